"""The five sections of a run, composed. Loading and checking is done by `config_file.load_run`."""

from dataclasses import dataclass, field

from olmo_hf.callbacks.args import CallbacksArgs
from olmo_hf.data.args import DataArgs
from olmo_hf.evaluation.args import EvaluationArgs
from olmo_hf.model.args import ModelArgs
from olmo_hf.training.args import TrainingArgs


@dataclass(frozen=True, kw_only=True)
class RunArgs:
    """A whole run, as the YAML says it. Frozen: what is printed at step 0 is what runs at step N."""

    name: str = ""
    """Name of the run; also its directory under `runs/`."""

    model: ModelArgs = field(default_factory=ModelArgs)
    data: DataArgs = field(default_factory=DataArgs)
    training: TrainingArgs = field(default_factory=TrainingArgs)
    callbacks: CallbacksArgs = field(default_factory=CallbacksArgs)
    evaluation: EvaluationArgs = field(default_factory=EvaluationArgs)
