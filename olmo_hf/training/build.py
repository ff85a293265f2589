"""From the sections and what was built of them to a trainer."""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from olmo_hf.data.collator import DataCollator
from olmo_hf.data.mixing import MixedDataset
from olmo_hf.data.order import OrderedDataset
from olmo_hf.training.args import TrainingArgs
from olmo_hf.training.arguments import build_training_arguments
from olmo_hf.training.batch_plan import BatchPlan
from olmo_hf.training.evaluating import Evaluator
from olmo_hf.training.sharding import Fill
from olmo_hf.training.trainer import OlmoTrainer

NOT_ARCHITECTURE = ("transformers_version", "dtype", "use_cache", "architectures", "_name_or_path", "auto_map")


def without_resets(training: TrainingArgs) -> TrainingArgs:
    """For a launch that continues its own run: what the first launch reset or skipped is not done again."""
    return replace(
        training,
        reset_optimizer=False,
        reset_trainer_state=False,
        restore_dataloader=True,
        fast_forward_batches=0,
        start_epoch=None,
    )


def run_identity(model: PreTrainedModel, dataset: OrderedDataset) -> dict[str, Any]:
    """What may not change unasked when a run is continued: architecture, data and their order."""
    architecture = {k: v for k, v in model.config.to_diff_dict().items() if k not in NOT_ARCHITECTURE}
    mix = dataset.dataset if isinstance(dataset.dataset, MixedDataset) else None
    tokens = dataset.dataset.dataset if isinstance(dataset.dataset, MixedDataset) else dataset.dataset
    files = hashlib.sha256("\n".join(Path(path).name for path in tokens.paths).encode()).hexdigest()[:16]
    return {
        "model": architecture,
        "data": {
            "instances": dataset.num_instances,
            "sequence_length": tokens.sequence_length,
            "token_dtype": str(tokens.token_dtype),
            "file_names": files,
            "seed": dataset.seed,
            "shuffle": dataset.shuffle,
            "order": dataset.order,
            "mix": {source.name: source.taken for source in mix.mix} if mix is not None else {},
        },
    }


def build_trainer(
    training: TrainingArgs,
    plan: BatchPlan,
    *,
    run_dir: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    train_data: tuple[OrderedDataset, DataCollator],
    evaluators: list[Evaluator],
    callbacks: list[TrainerCallback],
    flops_per_token: int | None,
    data_loading: dict[str, Any],
    fill_weights: Fill | None = None,
) -> OlmoTrainer:
    """A trainer ready to `train`, or to continue with `train(resume_from_checkpoint=...)`.

    Args:
        training: the `training` section.
        plan: what `plan_batches` made of it.
        run_dir: the run directory.
        train_data: data set in the run's order and its collator.
        flops_per_token: forward and backward; for the trainer's own count.
        data_loading: `dataloader_*` arguments, from the `data` section.
        fill_weights: gives a model without memory its weights once it is sharded.
    """
    dataset, collator = train_data
    return OlmoTrainer(
        model=model,
        args=build_training_arguments(training, plan, run_dir=run_dir, data_loading=data_loading),
        data_collator=collator,
        train_dataset=dataset,
        processing_class=tokenizer,
        evaluators=evaluators,
        callbacks=callbacks,
        identity=run_identity(model, dataset),
        flops_per_token=flops_per_token,
        fill_weights=fill_weights,
    )
