"""The part of the trainer that goes back to an earlier checkpoint in the middle of a launch, on other data.

Everything is as after a restart from that checkpoint, except that the batches read since then are passed over. Nothing
on disk is changed by it: a launch killed afterwards starts from the same checkpoint, trains the same steps, finds the
same reason and goes back again.
"""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerState

from olmo_hf.data.order import OrderedDataset
from olmo_hf.distributed import all_reduce_sum, gather_objects, is_main_process, run_on_all, world_size
from olmo_hf.errors import CheckpointError
from olmo_hf.training import checkpoints, commit
from olmo_hf.training.disk import Disk
from olmo_hf.training.flow import last_step
from olmo_hf.training.restarting import RestartingTrainer, move_on
from olmo_hf.training.snapshot import TRAINER_STATE
from olmo_hf.training.state import RunState, load_run_state
from olmo_hf.training.token_clock import TokenClockLR

logger = logging.getLogger(__name__)


def checkpoint_before(run_dir: Path, disk: Disk, step: int) -> Path | None:
    """The newest checkpoint of an earlier step that is whole on every disk. All ranks call."""
    not_after = step - 1
    while True:
        bound = not_after

        def look(bound: int = bound) -> int | None:
            found = commit.newest_whole(run_dir, up_to_step=bound)[0] if disk.is_writer else None
            return commit.step_of(found) if found is not None else None

        found = run_on_all(look, lambda messages: CheckpointError("; ".join(messages)))
        steps = [own for is_writer, own in gather_objects((disk.is_writer, found)) if is_writer]
        present = [own for own in steps if own is not None]
        if len(present) < len(steps):
            return None
        if len(set(present)) == 1:
            return commit.checkpoint_path(run_dir, present[0])
        not_after = min(present)


class GoingBackTrainer(RestartingTrainer):
    """Identical to `RestartingTrainer` except that a callback may make it go back (`wants_to_go_back`)."""

    _goal: Path | None = None
    """Checkpoint to which the run goes back before the next step."""

    _batches: Any = None
    """Micro-batches since then; None: those of the launch."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Identical to `RestartingTrainer`."""
        self._goal = self._batches = None
        return super().train(*args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Identical to `RestartingTrainer` except that it is decided here whether the run goes back.

        The step is logged, but neither evaluated nor saved. A run that is just being stopped ends without that
        checkpoint: the next launch comes here again.
        """
        super().log(logs, start_time)
        if "loss" not in logs or not self._somebody_wants_to_go_back():
            return
        assert self.saver is not None, "train() makes the saver"
        self.saver.wait()
        step = self.state.global_step
        self._goal = checkpoint_before(self.run_dir, self.saver.disk, step)
        if self._goal is None or not isinstance(self.train_dataset, OrderedDataset):
            self._goal = None
            for callback in self.olmo_callbacks:
                callback.on_gone_back(self.state, step, None)
            return
        self.control.should_save = self.control.should_evaluate = False
        if step >= last_step(self.args, self.state):
            self.control.should_training_stop = False

    def _somebody_wants_to_go_back(self) -> bool:
        """As rank 0 sees it, on all ranks; costs nothing where no callback ever does."""
        able = [callback for callback in self.olmo_callbacks if callback.max_rollbacks > 0]
        if not able:
            return False
        wants = any(callback.wants_to_go_back() for callback in able)
        return bool(all_reduce_sum(torch.tensor([float(wants and is_main_process())])).item() > 0)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list[Any], Any]:
        """Identical to `RestartingTrainer` except that the run goes back first, if that was decided."""
        if self._goal is not None:
            goal, self._goal = self._goal, None
            self._go_back(goal, epoch_iterator if self._batches is None else self._batches)
        return super().get_batch_samples(
            epoch_iterator if self._batches is None else self._batches, num_batches, device
        )

    def _go_back(self, checkpoint: Path, batches: Any) -> None:
        assert isinstance(self.train_dataset, OrderedDataset)
        from_step = self.state.global_step
        position = self._advance(self.train_dataset, self.train_dataset.start, from_step - self.data_start_step)
        saved, trainer_state = self._read(checkpoint)
        self.resumed_from = dataclasses.replace(saved, position=position)
        self.data_start_step = saved.step

        self.inner_optimizer.state.clear()  # a checkpoint from before the first step brings none
        extra = checkpoints.restore_tensors(checkpoint, self.plain_model, self.inner_optimizer)
        self._load_extra_tensors(extra)
        self._load_scaler(str(checkpoint))
        for name in ("global_step", "epoch", "num_input_tokens_seen", "total_flos", "log_history"):
            setattr(self.state, name, getattr(trainer_state, name))
        self.current_flos = 0
        self._globalstep_last_logged = saved.step
        self._initial_global_step -= from_step - saved.step  # the mean of all losses is one over all that was done
        if isinstance(self.lr_scheduler, TokenClockLR):
            self.lr_scheduler.set_clock(step=saved.step, tokens_seen=saved.tokens)
        else:
            move_on(self.lr_scheduler, saved.step)
        self._load_callback_states(saved.callbacks)
        checkpoints.restore_rng(checkpoint, saved.world_size, world_size())

        if hasattr(batches, "_shutdown_workers"):
            batches._shutdown_workers()
        self.train_dataset = self.train_dataset.starting_at(position)
        self._batches = iter(self.get_train_dataloader())
        for callback in self.olmo_callbacks:
            callback.on_gone_back(self.state, from_step, position)

    def _read(self, checkpoint: Path) -> tuple[RunState, TrainerState]:
        return run_on_all(
            lambda: (load_run_state(checkpoint), TrainerState.load_from_json(str(checkpoint / TRAINER_STATE))),
            lambda messages: CheckpointError("; ".join(messages)),
        )
