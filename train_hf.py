"""Pretrains a model, or goes on where an earlier launch stopped.

accelerate launch train_hf.py CONFIG.yaml [--section.field=value ...] [--dry_run [--skip_data]]
"""

import sys
from collections.abc import Sequence
from functools import partial

import olmo_hf.allocator  # noqa: F401 - acts when imported: memory is kept from the first tensor on
from olmo_hf.callbacks.build import build_callbacks
from olmo_hf.callbacks.cancellation import exit_code_of
from olmo_hf.callbacks.trackers import shield_trackers
from olmo_hf.config_file import run_to_yaml
from olmo_hf.data.build import build_train_data, data_loading
from olmo_hf.data.order import DataPosition
from olmo_hf.distributed import fsdp_requested, world_size
from olmo_hf.evaluation.build import build_evaluators
from olmo_hf.launch import join_processes, open_launch, plan_launch, read_command_line, run_and_report, show_plan
from olmo_hf.model.build import build_model, load_tokenizer, vocabulary_of
from olmo_hf.model.size import flops_per_token
from olmo_hf.model.weights import fill_weights
from olmo_hf.recipes.any_file import load_any_run
from olmo_hf.recipes.table import print_paper_plan
from olmo_hf.training.batch_plan import global_batch_size
from olmo_hf.training.build import build_trainer
from olmo_hf.training.run_directory import record_launch


def main(words: Sequence[str]) -> int:
    """Build the run from its configuration and train; returns the exit code."""
    options = read_command_line(words)
    run = load_any_run(options.config, options.overrides)
    join_processes(run)
    if options.skip_data:
        return print_paper_plan(run, num_processes=world_size())
    seed, length, half = run.training.seed, run.data.sequence_length, run.training.bf16 or run.training.fp16
    tokenizer = load_tokenizer(run.model, model_max_length=length)
    device = "meta" if options.dry_run or fsdp_requested() else "cpu"  # under FSDP no rank ever holds the whole model
    model = build_model(
        run.model, seed=seed, tokenizer=tokenizer, max_position_embeddings=length, device=device, half_precision=half
    )
    vocabulary, size = vocabulary_of(model.config), None if tokenizer is None else len(tokenizer)
    batch = global_batch_size(run.training, world_size())
    train_data = build_train_data(
        run.data, seed=seed, global_train_batch_size=batch, start=DataPosition(), tokenizer_size=size, **vocabulary
    )
    eval_batch, longest = run.training.per_device_eval_batch_size, model.config.max_position_embeddings
    eval_sizes = {"per_device_eval_batch_size": eval_batch, "max_position_embeddings": longest}
    evaluators = build_evaluators(run.evaluation, tokenizer=tokenizer, **eval_sizes, **vocabulary)
    flops = flops_per_token(model.config, length).total
    with open_launch(run, options) as opened:
        training, plan = plan_launch(run, opened, num_instances=train_data[0].num_instances)
        show_plan(run, model, plan, opened, with_memory=options.dry_run)
        if options.dry_run:
            return 0
        record_launch(opened, config_yaml=run_to_yaml(run), step=plan.start.steps)
        evaluates = {"evaluates": bool(evaluators), "evaluates_on_load": run.evaluation.on_load}
        callbacks = build_callbacks(
            run.callbacks, run_dir=opened.directory, plan=plan, flops_per_token=flops, **evaluates
        )
        trainer = build_trainer(
            training,
            plan,
            run_dir=opened.directory,
            model=model,
            tokenizer=tokenizer,
            train_data=train_data,
            evaluators=evaluators,
            callbacks=callbacks,
            flops_per_token=flops,
            data_loading=data_loading(run.data),
            fill_weights=partial(fill_weights, args=run.model, seed=seed),
        )
        shield_trackers(trainer.callback_handler.callbacks)
        trainer.train(str(opened.checkpoint) if opened.checkpoint is not None else None)
    return exit_code_of(callbacks)


if __name__ == "__main__":
    sys.exit(run_and_report(main, sys.argv[1:]))
