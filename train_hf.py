"""Pretrains a model, or goes on where an earlier launch stopped.

accelerate launch train_hf.py CONFIG.yaml [--section.field=value ...] [--dry_run [--skip_data]]
"""

import sys
from collections.abc import Sequence

from olmo_hf.callbacks.build import build_callbacks
from olmo_hf.callbacks.cancellation import exit_code_of
from olmo_hf.callbacks.trackers import shield_trackers
from olmo_hf.config_file import run_to_yaml
from olmo_hf.data.build import build_train_data, data_loading
from olmo_hf.data.order import DataPosition
from olmo_hf.distributed import is_main_process, start_processes, world_size
from olmo_hf.evaluation.build import build_evaluators
from olmo_hf.launch import print_plan, quiet_logs, read_command_line, run_and_report, run_directory
from olmo_hf.model.build import build_model, load_tokenizer, special_token_ids
from olmo_hf.model.size import describe_model, flops_per_token
from olmo_hf.recipes.any_file import load_any_run
from olmo_hf.recipes.table import memory_of, memory_rows, print_paper_plan
from olmo_hf.training.batch_plan import describe, global_batch_size, plan_batches
from olmo_hf.training.build import build_trainer, without_resets
from olmo_hf.training.run_directory import open_run, record_launch


def main(words: Sequence[str]) -> int:
    """Build the run from its configuration and train; returns the exit code."""
    options = read_command_line(words)
    run = load_any_run(options.config, options.overrides)
    start_processes()
    quiet_logs(main_process=is_main_process())
    run_dir = run_directory(run)
    if options.skip_data:
        print_paper_plan(run, num_processes=world_size(), main_process=is_main_process())
        return 0

    tokenizer = load_tokenizer(run.model, model_max_length=run.data.sequence_length)
    model = build_model(
        run.model,
        seed=run.training.seed,
        tokenizer=tokenizer,
        max_position_embeddings=run.data.sequence_length,
        device="meta" if options.dry_run else "cpu",
    )
    ids = special_token_ids(model.config)
    train_data = build_train_data(
        run.data,
        seed=run.training.seed,
        vocab_size=model.config.vocab_size,
        global_train_batch_size=global_batch_size(run.training, world_size()),
        start=DataPosition(),
        **ids,
    )
    evaluators = build_evaluators(
        run.evaluation,
        vocab_size=model.config.vocab_size,
        per_device_eval_batch_size=run.training.per_device_eval_batch_size,
        **ids,
    )
    flops = flops_per_token(model.config, run.data.sequence_length).total

    with open_run(
        run_dir,
        resume=run.training.resume,
        name=run.name,
        dry_run=options.dry_run,
        upload_to=run.training.upload_to,
    ) as opened:
        training = without_resets(run.training) if opened.from_own else run.training
        counted = opened.state if not training.reset_trainer_state else type(opened.state)()
        plan = plan_batches(
            training,
            world_size=world_size(),
            sequence_length=run.data.sequence_length,
            num_instances=train_data[0].num_instances,
            step=counted.step,
            tokens_seen=counted.tokens,
            eval_interval=run.evaluation.interval,
        )
        table = [*describe_model(model.config, run.data.sequence_length), *describe(plan)]
        table += memory_rows(memory_of(run, model.config, plan)) if options.dry_run else []
        print_plan(run.name, table, opened, main_process=is_main_process())
        if options.dry_run:
            return 0
        record_launch(opened, config_yaml=run_to_yaml(run), step=counted.step)
        callbacks = build_callbacks(
            run.callbacks,
            run_dir=run_dir,
            plan=plan,
            evaluates=bool(evaluators),
            evaluates_on_load=run.evaluation.on_load,
            flops_per_token=flops,
        )
        trainer = build_trainer(
            training,
            plan,
            run_dir=run_dir,
            model=model,
            tokenizer=tokenizer,
            train_data=train_data,
            evaluators=evaluators,
            callbacks=callbacks,
            flops_per_token=flops,
            data_loading=data_loading(run.data),
        )
        shield_trackers(trainer.callback_handler.callbacks)
        trainer.train(str(opened.checkpoint) if opened.checkpoint is not None else None)
    return exit_code_of(callbacks)


if __name__ == "__main__":
    sys.exit(run_and_report(main, sys.argv[1:]))
