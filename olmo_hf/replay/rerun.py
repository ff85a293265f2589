"""Trains recorded steps again, in a directory of its own; the run's directory is only read."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerControl, TrainerState, TrainingArguments

from olmo_hf.data.build import build_collator, data_loading, open_train_data
from olmo_hf.data.order import DataPosition
from olmo_hf.distributed import world_size
from olmo_hf.errors import CheckpointError
from olmo_hf.model.build import build_model, load_tokenizer, vocabulary_of
from olmo_hf.replay.record import COMPARED
from olmo_hf.replay.way import Segment, Way
from olmo_hf.training import commit
from olmo_hf.training.args import TrainingArgs
from olmo_hf.training.batch_plan import global_batch_size, plan_batches
from olmo_hf.training.build import build_trainer, without_resets
from olmo_hf.training.callback import OlmoCallback
from olmo_hf.training.state import RunState, load_run_state

logger = logging.getLogger(__name__)


class Collector(OlmoCallback):
    """Logs at the steps at which the run logged, and keeps what is compared.

    Args:
        steps: at which to log; also where means begin anew.
        saves: whether the last step is saved, to go on from.
    """

    def __init__(self, steps: frozenset[int], *, saves: bool):
        self.rows: dict[int, dict[str, float]] = {}
        self._steps = steps
        self._saves = saves

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        control.should_log = state.global_step in self._steps
        control.should_save = self._saves and control.should_training_stop

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs is not None and COMPARED[0] in logs:
            self.rows[state.global_step] = {key: float(logs[key]) for key in COMPARED if key in logs}


def train_again(way: Way, workdir: Path) -> dict[int, dict[str, float]]:
    """Metrics of the steps of a way by step. All ranks call.

    Args:
        way: from `find_way`.
        workdir: an empty directory, the same on all ranks of a machine.

    Raises:
        CheckpointError, DataError, ConfigError: the run's data or checkpoint are not what they were.
    """
    rows: dict[int, dict[str, float]] = {}
    checkpoint = way.checkpoint
    for number, segment in enumerate(way.segments):
        is_last = number == len(way.segments) - 1
        directory = workdir / f"segment-{number}"
        rows |= _train_segment(segment, checkpoint, directory, saves=not is_last)
        checkpoint = commit.checkpoint_path(directory, segment.last_step)
    return rows


def _train_segment(
    segment: Segment, checkpoint: Path | None, directory: Path, *, saves: bool
) -> dict[int, dict[str, float]]:
    run = segment.settings
    threads = segment.launch.threads
    # Sums are made in another order by another number of threads. To set the number that is there would change them
    # too: from then on MKL divides its work otherwise (torch takes its dynamic mode away).
    if threads not in (None, torch.get_num_threads()) and not torch.cuda.is_available():
        torch.set_num_threads(threads)
    training = quiet(run.training, last_step=segment.last_step)
    if checkpoint is None and training.resume not in ("auto", "never"):
        checkpoint = _starting_point(training.resume)
    elif checkpoint is not None or segment.first_step > 0:
        training = without_resets(training)
    state = RunState() if checkpoint is None or training.reset_trainer_state else load_run_state(checkpoint)
    tokenizer = load_tokenizer(run.model, model_max_length=run.data.sequence_length)
    model = build_model(
        run.model, seed=training.seed, tokenizer=tokenizer, max_position_embeddings=run.data.sequence_length
    )
    ids = {name: value for name, value in vocabulary_of(model.config).items() if name != "vocab_size"}
    dataset = open_train_data(
        run.data,
        seed=training.seed,
        global_train_batch_size=global_batch_size(training, segment.launch.world_size),
        start=DataPosition(),
        **ids,
    )
    plan = plan_batches(
        training,
        world_size=world_size(),
        sequence_length=run.data.sequence_length,
        num_instances=dataset.num_instances,
        step=state.step,
        tokens_seen=state.tokens,
    )
    collector = Collector(segment.cuts | frozenset(segment.rows) | {segment.last_step}, saves=saves)
    trainer = build_trainer(
        training,
        plan,
        run_dir=directory,
        model=model,
        tokenizer=tokenizer,
        train_data=(dataset, build_collator(ids["pad_token_id"], run.data.document_positions)),
        evaluators=[],
        callbacks=[collector],
        flops_per_token=0,
        data_loading=data_loading(run.data),
    )
    trainer.first_position = segment.position
    trainer.train(str(checkpoint) if checkpoint is not None else None)
    return collector.rows


def quiet(training: TrainingArgs, *, last_step: int) -> TrainingArgs:
    """The section without anything that leaves traces, ending at a step."""
    return dataclasses.replace(
        training,
        stop_at=last_step,
        stop_after=None,
        save_interval=None,
        save_interval_ephemeral=None,
        save_interval_unsharded=None,
        save_at_start=False,
        checkpoint_async=False,
        upload_to=None,
        report_to=(),
        logging_steps=1,
        optimizer_metrics_steps=None,
    )


def _starting_point(resume: str) -> Path:
    source = Path(resume)
    if not source.is_dir():
        raise CheckpointError(
            f"the run began from {resume}, which is not a directory here; bring it back to that place, or replay a "
            "step after the run's own first checkpoint"
        )
    found = source if (source / commit.MANIFEST).is_file() else commit.newest_whole(source)[0]
    if found is None:
        raise CheckpointError(f"the run began from {resume}, and none of the checkpoints there is whole")
    return found
