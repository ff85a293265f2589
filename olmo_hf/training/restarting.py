"""The part of the trainer that a restart depends on: the order of the data, checkpoints, and taking a run up again."""

import logging
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from olmo_hf.data.order import DataPosition, OrderedDataset, advance
from olmo_hf.data.sampler import GlobalBatchSampler
from olmo_hf.distributed import rank, world_size
from olmo_hf.errors import CheckpointError, ConfigError
from olmo_hf.training import checkpoints, commit
from olmo_hf.training.flow import SaveSchedule, last_step, what_to_save
from olmo_hf.training.fsdp_messages import spare_messages
from olmo_hf.training.learning import LearningTrainer
from olmo_hf.training.rotation import Keep
from olmo_hf.training.saving import CheckpointSaver, build_saver
from olmo_hf.training.schedule_free import averaged_weights
from olmo_hf.training.sharding import Fill, has_no_memory, restore_groups, shard_without_memory
from olmo_hf.training.snapshot import Snapshot
from olmo_hf.training.state import RunState, compare_identity, load_run_state
from olmo_hf.training.token_clock import TokenClockLR
from olmo_hf.training.worker_signals import end_workers_at_exit, outlive_first_request

logger = logging.getLogger(__name__)


class RestartingTrainer(LearningTrainer):
    """Identical to `LearningTrainer` except for where batches come from and how a run is saved and taken up again."""

    identity: dict[str, Any]
    resumed_from: RunState | None
    step_ids: list[int]
    flops_per_token: int | None
    save_schedule: SaveSchedule
    fill_weights: Fill | None
    saver: CheckpointSaver | None = None
    """Made when training starts."""

    first_position: DataPosition | None = None
    """Where the data go on after a restart, if not where the checkpoint says."""

    data_start_step: int = 0
    """The step after which the data begin with `train_dataset.start`."""

    @property
    def run_dir(self) -> Path:
        """The run directory."""
        return Path(str(self.args.output_dir))

    @property
    def global_batch_size(self) -> int:
        """Instances of one optimizer step over all ranks."""
        return self.get_total_train_batch_size(self.args)

    # ---- data ----

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Identical to `Trainer` except that a data set with an order of its own is read in that order.

        Each rank reads its share of every global batch; nothing is skipped by reading it, and the loader's own
        random draws do not touch the run's.
        """
        dataset = self.train_dataset
        if not isinstance(dataset, OrderedDataset):
            return super().get_train_dataloader()
        sampler = GlobalBatchSampler(
            # A run that goes back reads more batches than it has steps.
            steps=self.args.max_steps * (1 + sum(callback.max_rollbacks for callback in self.olmo_callbacks)),
            global_batch_size=self.global_batch_size,
            per_device_batch_size=self.args.per_device_train_batch_size,
            rank=rank(),
            world_size=world_size(),
        )
        workers = self.args.dataloader_num_workers
        if workers:
            end_workers_at_exit()
        return DataLoader(
            dataset,
            batch_sampler=sampler,
            collate_fn=self.data_collator,
            num_workers=workers,
            pin_memory=self.args.dataloader_pin_memory,
            prefetch_factor=self.args.dataloader_prefetch_factor if workers else None,
            persistent_workers=workers > 0,
            generator=torch.Generator().manual_seed(self.args.seed),
            worker_init_fn=outlive_first_request,
        )

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list[Any], Any]:
        """Identical to `Trainer` except that instance ids are taken out and shown to the callbacks.

        Before every step it is also asked whether a save in the background has failed.
        """
        if self.saver is not None:
            self.saver.poll()
        batches, denominator = super().get_batch_samples(epoch_iterator, num_batches, device)
        ids = [batch.pop("index") for batch in batches if "index" in batch]
        self.step_ids = torch.cat(ids).tolist() if ids else []
        if self.step_ids:
            for callback in self.olmo_callbacks:
                callback.on_instances(self.state, self.step_ids)
        return batches, denominator

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Identical to `Trainer` except that the count per token is worked out once, not at every micro-batch."""
        if self.flops_per_token is None:
            return super().floating_point_ops(inputs)
        return self.flops_per_token * inputs["input_ids"].numel()

    # ---- restart ----

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Identical to `Trainer.train` except that `True` means the newest checkpoint that verifies."""
        checkpoint: Path | None = None
        self.resumed_from, self.data_start_step = None, 0
        if resume_from_checkpoint is True:
            checkpoint, passed_over = commit.newest_whole(self.run_dir)
            for reason in passed_over:
                logger.warning("passed over: %s", reason)
            if checkpoint is None:
                raise CheckpointError(
                    f"{self.run_dir}: no whole checkpoint to resume from; name another, or start afresh"
                )
        elif resume_from_checkpoint:
            checkpoint = Path(resume_from_checkpoint)
        if checkpoint is not None:
            self._take_up(checkpoint)
        limit = -1 if self.args.save_total_limit is None else self.args.save_total_limit
        self.saver = build_saver(
            self.run_dir,
            keep=Keep(
                sharded=limit if self.args.keep_sharded == -1 else self.args.keep_sharded,
                unsharded=limit if self.args.keep_unsharded == -1 else self.args.keep_unsharded,
            ),
            in_background=self.args.checkpoint_async,
            upload_to=self.args.upload_to,
        )
        try:
            result = super().train(str(checkpoint) if checkpoint is not None else None, *args, **kwargs)
        except BaseException:
            for callback in self.olmo_callbacks:
                callback.on_failure(self.state)
            self.saver.give_up()
            raise
        self.saver.finish()
        return result

    def _take_up(self, checkpoint: Path) -> None:
        """Read where the run of a checkpoint stands, and start the data there.

        Continuing from the run's own directory, nothing is skipped again: an earlier launch did that.
        """
        self.resumed_from = state = load_run_state(checkpoint)
        is_own = checkpoint.resolve().parent == self.run_dir.resolve()
        self._require_same_run(checkpoint, state)
        self.data_start_step = 0 if self.args.reset_trainer_state else state.step
        if self.args.reset_trainer_state or not isinstance(self.train_dataset, OrderedDataset):
            return
        self.args.ignore_data_skip = True  # the order begins in the right place; the Trainer would skip once more
        position = state.position if self.args.restore_dataloader or is_own else DataPosition()
        if not is_own and self.args.start_epoch is not None and self.args.start_epoch != position.epoch:
            position = DataPosition(epoch=self.args.start_epoch)
        if not is_own and self.args.fast_forward_batches:
            position = self._advance(self.train_dataset, position, self.args.fast_forward_batches)
        if self.first_position is not None:
            position = self.first_position
        self.train_dataset = self.train_dataset.starting_at(position)

    def _require_same_run(self, checkpoint: Path, state: RunState) -> None:
        saved, current = state.identity, self.identity
        new_data = self.args.reset_trainer_state or not self.args.restore_dataloader
        if new_data:  # another stage: the data may be new, the architecture may not
            saved, current = ({k: v for k, v in one.items() if k != "data"} for one in (saved, current))
        if not saved or not current:
            return
        if differences := compare_identity(saved, current):
            raise ConfigError([f"{checkpoint} belongs to another run: {difference}" for difference in differences])

    def _advance(self, dataset: OrderedDataset, position: DataPosition, steps: int) -> DataPosition:
        return advance(position, steps, global_batch_size=self.global_batch_size, num_instances=dataset.num_instances)

    def _init_training_state(
        self, max_steps: int, steps_per_epoch: int, num_epochs: int, resume_from_checkpoint: str | None, trial: Any
    ) -> tuple[int, int]:
        """Identical to `Trainer` except that intervals come from this launch, and counters may start from zero."""
        source = None if self.args.reset_trainer_state else resume_from_checkpoint
        started = super()._init_training_state(max_steps, steps_per_epoch, num_epochs, source, trial)
        self.state.compute_steps(self.args, max_steps)
        # Also where more batches are on offer than there are steps, and where `stop_at` lies behind.
        is_over = self.state.global_step >= last_step(self.args, self.state)
        return (num_epochs, 0) if is_over else started

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        """Identical to `Trainer` except that a fresh run first writes a checkpoint and reads it back.

        A model without memory is sharded and filled first, or left to the checkpoint to be filled.
        """
        model = cast(nn.Module, self.model)
        if has_no_memory(model):
            shard_without_memory(self.accelerator, model, layers_per_unit=self.args.fsdp_layers_per_unit)
            if resume_from_checkpoint is None:
                assert self.fill_weights is not None, "whoever builds a model without memory says what goes into it"
                self.fill_weights(model)
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        if self.is_fsdp_enabled:
            restore_groups(self.inner_optimizer, self.plain_model)
            spare_messages(cast(PreTrainedModel, self.plain_model))
        if resume_from_checkpoint is None and self.args.save_at_start:
            self._save_checkpoint(self.plain_model, trial=None)
            assert self.saver is not None, "train() makes the saver"
            first = commit.checkpoint_path(self.run_dir, self.state.global_step)
            checkpoints.read_back(first, self.plain_model, self.inner_optimizer, disk=self.saver.disk)
        return prepared

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Identical to `LearningTrainer` except that a second warm-up goes on where an earlier launch began it."""
        if self.args.bolt_on_warmup > 0 and self.args.reset_optimizer:
            self.bolt_on_start = {"steps": self.state.global_step, "tokens": self.state.num_input_tokens_seen}
        elif self.resumed_from is not None and not self.args.reset_trainer_state:
            self.bolt_on_start = self.resumed_from.bolt_on_start
        return super().create_scheduler(num_training_steps, optimizer)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Identical to `Trainer` except that nothing happens yet: weights come with the optimizer, once sharded."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Identical to `Trainer` except that model and optimizer are read here, whatever the number of ranks.

        The curve of the learning rate is this launch's: our scheduler's clock was set from the restored counters when
        it was made, and Hugging Face's are moved on to where the run stands.
        """
        if checkpoint is None:
            return
        if self.is_fsdp_enabled:
            restore_groups(self.inner_optimizer, self.plain_model)
        optimizer = None if self.args.reset_optimizer else self.inner_optimizer
        extra = checkpoints.restore_tensors(Path(checkpoint), self.plain_model, optimizer)
        self._load_extra_tensors(extra)
        move_on(self.lr_scheduler, self.state.global_step)
        if self.resumed_from is not None:
            self._load_callback_states(self.resumed_from.callbacks)

    def _load_callback_states(self, states: dict[str, list[dict[str, Any]]]) -> None:
        left = {name: list(of_class) for name, of_class in states.items()}
        for callback in self.olmo_callbacks:
            name = type(callback).__name__
            if left.get(name):
                try:
                    callback.load_state_dict(left[name].pop(0))
                except (KeyError, TypeError, ValueError) as error:
                    raise CheckpointError(
                        f"run_state.json: not a state of {name} ({error!r}); choose another checkpoint"
                    ) from error

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Identical to `Trainer` except that the state is in `run_state.json`."""
        scaler = getattr(self.accelerator, "scaler", None)
        if scaler is not None and self.resumed_from is not None and self.resumed_from.scaler is not None:
            scaler.load_state_dict(self.resumed_from.scaler)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Identical to `Trainer` except for the file format (JSON) and for saying when states start anew."""
        if checkpoint is not None and self.resumed_from is not None and not self.args.reset_trainer_state:
            checkpoints.restore_rng(Path(checkpoint), self.resumed_from.world_size, world_size())

    # ---- checkpoints ----

    @property
    def plain_model(self) -> nn.Module:
        """The model without DDP or compile around it."""
        return self.accelerator.unwrap_model(self.model, keep_torch_compile=False)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Identical to `Trainer` except that the result is whole or absent, of a kind, and rotated by step number."""
        assert self.saver is not None, "train() makes the saver"
        self._tell_long_work("checkpoint")
        self.store_flos()
        step = self.state.global_step
        final = self.control.should_training_stop or step >= last_step(self.args, self.state)
        kind, has_optimizer = what_to_save(
            self.save_schedule.due,
            step=step,
            final=final,
            sharded=self.is_fsdp_enabled,
            unsharded_optimizer=self.args.unsharded_optimizer,
        )
        with averaged_weights(self.inner_optimizer):
            self.saver.save(self._snapshot(), kind=kind, has_optimizer=has_optimizer, wait=final or step == 0)

    def _tell_long_work(self, what: str) -> None:
        for callback in self.olmo_callbacks:
            callback.on_long_work(self.state, what)

    def _snapshot(self) -> Snapshot:
        step, scaler = self.state.global_step, getattr(self.accelerator, "scaler", None)
        position = DataPosition()
        if isinstance(self.train_dataset, OrderedDataset):
            position = self._advance(self.train_dataset, self.train_dataset.start, step - self.data_start_step)
        states: dict[str, list[dict[str, Any]]] = {}
        for callback in self.olmo_callbacks:
            if state := callback.state_dict():
                states.setdefault(type(callback).__name__, []).append(state)
        return Snapshot(
            model=self.plain_model,
            optimizer=self.inner_optimizer,
            run_state=RunState(
                step=step,
                tokens=self.state.num_input_tokens_seen,
                position=position,
                world_size=world_size(),
                identity=self.identity,
                bolt_on_start=self.bolt_on_start,
                scaler=scaler.state_dict() if scaler is not None else None,
                callbacks=states,
            ),
            trainer_state=self.state,
            tokenizer=cast("PreTrainedTokenizerBase | None", self.processing_class),
            extra=self._extra_tensors(),
        )


def move_on(scheduler: Any, step: int) -> None:
    """Bring a scheduler of torch from its beginning to where it stands after so many steps."""
    if isinstance(scheduler, TokenClockLR) or step == 0:
        return
    if isinstance(scheduler, ReduceLROnPlateau):
        logger.warning("the learning rate starts anew: what %s has seen cannot be known", type(scheduler).__name__)
        return
    scheduler._step_count = step  # or torch warns that the optimizer has not stepped
    if isinstance(scheduler, LambdaLR):  # a function of the step alone
        scheduler.last_epoch = step - 1
        scheduler.step()
        return
    for _ in range(step):
        scheduler.step()
