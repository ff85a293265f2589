"""The evaluators of training on finished models: one checkpoint, several, or all of a run."""

import contextlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from olmo_hf import distributed
from olmo_hf.config_file import load_run
from olmo_hf.errors import CheckpointError, ConfigError
from olmo_hf.evaluation.args import EvaluationArgs, EvaluatorArgs, evaluation_problems
from olmo_hf.evaluation.build import build_evaluators
from olmo_hf.evaluation.icl import DownstreamEvaluator
from olmo_hf.evaluation.tasks.table import find_tasks
from olmo_hf.model.args import ModelArgs
from olmo_hf.model.build import load_tokenizer, vocabulary_of
from olmo_hf.training.commit import list_checkpoints, step_of
from olmo_hf.training.evaluating import Evaluator, run_evaluators

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """What is asked for on the command line."""

    models: tuple[str, ...]
    """Checkpoint or run directories, or hub ids."""

    all_checkpoints: bool = False
    """All whole models of the runs, not only the newest."""

    downstream: EvaluatorArgs = field(default_factory=lambda: EvaluatorArgs(type="downstream"))
    """Tasks; without any, `config` must name evaluators."""

    config: Path | None = None
    """A run whose evaluators are used too."""

    tokenizer: str | None = None
    """Instead of the one beside the checkpoint."""

    batch_size: int = 8
    """Instances of a forward pass."""

    dtype: str = "float32"
    """Of the weights."""

    device: str | None = None
    """None: the accelerator, if there is one."""


@dataclass(frozen=True)
class Target:
    """A model to evaluate; `step` where it is a checkpoint of a run."""

    name: str
    source: str
    step: int | None = None


@dataclass(frozen=True)
class Result:
    """What was found of one model.

    Attributes:
        target: the model.
        metrics: by their full names, as in a run's record.
        questions: how many questions of each task counted.
        truncated: how many of them lost their beginning.
    """

    target: Target
    metrics: dict[str, float]
    questions: dict[str, int]
    truncated: dict[str, int]

    def as_json(self) -> dict[str, Any]:
        """Everything, for a file that programs read."""
        return {
            "model": self.target.source,
            "step": self.target.step,
            "metrics": self.metrics,
            "questions": self.questions,
            "truncated_questions": self.truncated,
        }


def find_targets(models: Sequence[str], *, all_checkpoints: bool) -> tuple[list[Target], list[str]]:
    """The models that are meant, in order of steps within a run, and notes on checkpoints that are passed over.

    Raises:
        CheckpointError: a directory that holds no model, or no models at all.
    """
    if not models:
        raise ConfigError("no model is named; give a checkpoint, a run directory or a hub id")
    targets: list[Target] = []
    notes: list[str] = []
    for given in models:
        path = Path(given).expanduser()
        if not path.is_dir():
            if path.exists() or given.startswith((".", "/", "~")) or given.count("/") > 1:
                raise CheckpointError(f"{given}: there is no such directory; give a checkpoint or a run directory")
            targets.append(Target(given, given))
            continue
        if (path / "config.json").is_file():
            step = step_of(path.resolve()) if path.resolve().name.startswith("checkpoint-") else None
            targets.append(Target(given.rstrip("/"), str(path), step))
            continue
        found = list_checkpoints(path)
        whole = [one for one in found if (one / "config.json").is_file()]
        if not whole:
            sharded = " (its checkpoints are sharded: `olmo-hf convert` makes models of them)" if found else ""
            raise CheckpointError(f"{given}: holds no model{sharded}; give a checkpoint or a run with whole ones")
        notes += [f"{one} is sharded and passed over; `olmo-hf convert` makes a model of it" for one in found[::-1]
                  if one not in whole and all_checkpoints]  # fmt: skip
        chosen = whole[::-1] if all_checkpoints else whole[:1]
        targets += [Target(f"{given.rstrip('/')}/{one.name}", str(one), step_of(one)) for one in chosen]
    return targets, notes


def evaluate_targets(options: EvaluateOptions, targets: Sequence[Target]) -> Iterator[Result]:
    """Evaluates one model after the other. Questions are read and encoded once for all with the same tokenizer.

    Raises:
        ConfigError: settings that do not fit; nothing was loaded.
        CheckpointError: a model that cannot be loaded.
        DataError: tasks or token files that cannot be read.
    """
    args, device = evaluation_args(options), _device(options)
    evaluators: list[Evaluator] = []
    built_for: Any = None
    for target in targets:
        if len(targets) > 1 and _is_gone(target):
            if distributed.is_main_process():
                logger.warning("%s is gone since the launch: its run has a newer one; passed over", target.source)
            continue
        model = _load(target, options)
        tokenizer = tokenizer_of(target, options)
        config: Any = model.config  # ours or one of transformers
        longest = _longest_sequence(config)
        fits = (_fingerprint(tokenizer), vocabulary_of(config), longest)
        if fits != built_for:
            evaluators = build_evaluators(
                args,
                per_device_eval_batch_size=options.batch_size,
                tokenizer=tokenizer,
                max_position_embeddings=longest,
                **vocabulary_of(config),
            )
            built_for = fits
        torch.nn.Module.to(model, device)
        metrics = run_evaluators(evaluators, model, device=device, autocast=contextlib.nullcontext)
        tasks = [one for one in evaluators if isinstance(one, DownstreamEvaluator)]
        yield Result(
            target,
            metrics,
            {task.label: task.num_questions for task in tasks},
            {task.label: task.num_truncated for task in tasks if task.num_truncated},
        )
        del model


def evaluation_args(options: EvaluateOptions) -> EvaluationArgs:
    """The evaluators that are asked for: tasks of the command line, and those of a run's file.

    Raises:
        ConfigError: there is none, or numbers that cannot be; all problems at once.
    """
    evaluators: tuple[EvaluatorArgs, ...] = ()
    if options.config is not None:
        evaluators = load_run(options.config).evaluation.evaluators
    if options.downstream.tasks:
        find_tasks(options.downstream.tasks, options.downstream.task_files)  # before a model is loaded
        evaluators = (options.downstream, *evaluators)
    if not evaluators:
        raise ConfigError(
            "nothing is to be measured; name tasks (--tasks piqa,arc_easy; --list-tasks lists them) or a run with "
            "evaluators (--config RUN.yaml)"
        )
    args = EvaluationArgs(evaluators=evaluators)
    problems = evaluation_problems(args)
    if options.batch_size < 1:
        problems.append(f"--batch-size: found {options.batch_size}, expected at least 1")
    if problems:
        raise ConfigError(problems)
    return args


def tokenizer_of(target: Target, options: EvaluateOptions) -> PreTrainedTokenizerBase | None:
    """The tokenizer that is asked for, or the one beside the model; None where there is none."""
    if options.tokenizer is not None:
        return load_tokenizer(ModelArgs(tokenizer=options.tokenizer))
    if Path(target.source).is_dir():
        return load_tokenizer(ModelArgs(init_from=target.source))
    return load_tokenizer(ModelArgs(tokenizer=target.source))


def comparable(results: Sequence[Result]) -> list[tuple[str, list[float | None]]]:
    """Rows of a table: a metric, and its value for each model."""
    names = list(dict.fromkeys(name for result in results for name in result.metrics))
    return [(name, [result.metrics.get(name) for result in results]) for name in names]


def write_results(results: Sequence[Result], path: Path) -> None:
    """Writes the results as JSON; values that are no numbers become null, since JSON knows none."""
    rows = []
    for result in results:
        row = result.as_json()
        row["metrics"] = {name: value if abs(value) < float("inf") else None for name, value in result.metrics.items()}
        rows.append(row)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"results": rows}, indent=1) + "\n", encoding="utf-8")


def _device(options: EvaluateOptions) -> torch.device:
    if options.device is not None:
        try:
            device = torch.device(options.device)
            torch.empty(1, device=device)
        # torch built without a backend asserts that it has it.
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            raise ConfigError(
                f"--device: found {options.device!r}, which cannot be used here ({str(error).splitlines()[0]}); leave "
                "it out to take what there is"
            ) from error
        return device
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    return torch.device(kind.type, distributed.rank() % torch.accelerator.device_count())


def _is_gone(target: Target) -> bool:
    """Whether a run that goes on has meanwhile removed this checkpoint, as any rank sees it."""
    here = target.step is not None and not Path(target.source).is_dir()
    return bool(distributed.all_reduce_sum(torch.tensor([float(here)])).item() > 0)


def _load(target: Target, options: EvaluateOptions) -> PreTrainedModel:
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            target.source, dtype=getattr(torch, options.dtype), output_loading_info=True
        )
    except Exception as error:  # transformers and its readers raise many kinds
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise CheckpointError(
            f"{target.source}: cannot be loaded as a model: {reason}; give a checkpoint directory or a hub id that "
            "can be reached"
        ) from error
    model: PreTrainedModel = loaded[0]
    missing = sorted(loaded[1]["missing_keys"])
    if missing:  # transformers fills them with random numbers and only warns
        raise CheckpointError(
            f"{target.source}: lacks {len(missing)} weights of its own architecture ({', '.join(missing[:5])}); give "
            "a whole checkpoint, what would be measured is noise"
        )
    return model.eval()


def _longest_sequence(config: Any) -> int | None:
    """How many tokens a model reads at most; MPT has a name of its own for it, Bloom and Mamba have no limit."""
    for name in ("max_position_embeddings", "max_seq_len"):
        found: int | None = getattr(config, name, None)
        if found is not None:
            return found
    return None


def _fingerprint(tokenizer: PreTrainedTokenizerBase | None) -> Any:
    backend: Callable[[], str] | None = getattr(getattr(tokenizer, "backend_tokenizer", None), "to_str", None)
    return backend() if backend is not None else id(tokenizer)
