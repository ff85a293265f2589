"""Checkpoints, restarts, logging, launch and evaluation of an original configuration in our words."""

import re
from pathlib import Path

from olmo_hf.recipes.ledger import Ledger

_SHARDINGS = {
    "SHARD_GRAD_OP": "fsdp2_shard_grad_op.yaml",
    "HYBRID_SHARD": "hsdp.yaml",
    "_HYBRID_SHARD_ZERO2": "hsdp.yaml",
    "NO_SHARD": "ddp.yaml",
}
"""Launch files that do what a sharding strategy of the original does; the others are `fsdp2.yaml`'s."""

_LAUNCHED = "sharding is chosen at launch: accelerate launch --config_file accelerate_configs/"


def translate_name(ledger: Ledger) -> None:
    """Sets the name and the run directory."""
    name = ledger.value("run_name")
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", str(name)).lstrip("._-")[:100] if name is not None else ""
    if name is None or not plain:
        ledger.put("name", "imported", "run_name is not set")
        ledger.no_effect("run_name", "empty; the run is called `imported`")
    elif plain == name:
        ledger.keep("run_name", "name")
    else:
        ledger.translate("run_name", "name", plain, "a name is also a directory")
    folder = ledger.value("save_folder")
    if "save_folder" in ledger.given and folder is not None and "://" in str(folder):
        ledger.refuse("save_folder", "a run directory is a local one; give --save_folder=DIRECTORY")
    elif "save_folder" in ledger.given and folder is not None:
        ledger.keep("save_folder", "training.output_dir")
    else:
        ledger.no_effect("save_folder", "not set: runs/NAME")
    ledger.no_effect("dry_run", "give --dry_run on the command line")
    ledger.no_effect("save_overwrite", "nothing is ever overwritten: a run goes on from its newest checkpoint")
    remote = ledger.value("remote_save_folder")
    if remote is None or "://" in str(remote):
        ledger.keep("remote_save_folder", "training.upload_to")
    else:
        ledger.translate("remote_save_folder", "training.upload_to", f"file://{Path(str(remote)).absolute()}")


def translate_saving(ledger: Ledger) -> None:
    """Sets the two series of permanent checkpoints and the rolling one."""
    sharded, unsharded = ledger.value("save_interval"), ledger.value("save_interval_unsharded")
    keep_sharded = ledger.value("save_num_checkpoints_to_keep")
    keep_unsharded = ledger.value("save_num_unsharded_checkpoints_to_keep")
    note_sharded = note_unsharded = ""
    if ledger.value("distributed_strategy") != "fsdp":
        if unsharded is None and ledger.value("load_path") is None:
            unsharded, note_unsharded = sharded, "the original takes save_interval, because nothing is sharded"
        sharded, note_sharded = None, "the original saves no sharded checkpoints without FSDP"
    if keep_sharded == 0 and sharded is not None:
        sharded, note_sharded = None, "save_num_checkpoints_to_keep is 0: none are saved"
    if keep_unsharded == 0 and unsharded is not None:
        unsharded, note_unsharded = None, "save_num_unsharded_checkpoints_to_keep is 0: none are saved"
    series = (
        ("save_interval", "training.save_interval", sharded, note_sharded),
        ("save_interval_unsharded", "training.save_interval_unsharded", unsharded, note_unsharded),
    )
    for key, ours, interval, note in series:
        if note:
            ledger.translate(key, ours, interval, note)
        else:
            ledger.keep(key, ours)
    for key, ours, number in (
        ("save_num_checkpoints_to_keep", "training.keep_sharded", keep_sharded),
        ("save_num_unsharded_checkpoints_to_keep", "training.keep_unsharded", keep_unsharded),
    ):
        if number == 0:
            ledger.translate(key, ours, -1, "0 means that none are saved; the interval says so here")
        else:
            ledger.keep(key, ours)
    ledger.keep("save_interval_ephemeral", "training.save_interval_ephemeral")
    for key in ("force_save_unsharded", "new_style_checkpoints", "sharded_checkpointer"):
        ledger.no_effect(
            key, "there is one format of sharded checkpoints, and the last one of a launch is a whole model"
        )
    ledger.no_effect("load_path_sharded_checkpointer", "`olmo-hf convert` finds the format by itself")


def translate_restart(ledger: Ledger) -> None:
    """Sets what the run continues from and what of it is reset."""
    path = ledger.value("load_path")
    ledger.no_effect("try_load_latest_save", "always so: a run's own newest checkpoint goes before load_path")
    if path is None:
        ledger.no_effect("load_path", "not set: a new run, or the run's own newest checkpoint")
        for key in ("reset_optimizer_state", "reset_trainer_state", "restore_dataloader", "fast_forward_batches"):
            ledger.no_effect(key, "load_path is not set")
        ledger.no_effect("epoch", "load_path is not set")
        ledger.translate(
            "no_pre_train_checkpoint", "training.save_at_start", not ledger.value("no_pre_train_checkpoint")
        )
        return
    note = "a checkpoint of ours; one of the original becomes one by `olmo-hf convert`"
    ledger.translate("load_path", "training.resume", path, note)
    ledger.translate("no_pre_train_checkpoint", "training.save_at_start", False, "load_path is set")
    reset = bool(ledger.value("reset_trainer_state"))
    restore = bool(ledger.value("restore_dataloader"))
    ledger.translate("reset_trainer_state", "training.reset_trainer_state", reset or not restore)
    note = "steps, tokens and data count from zero; the optimizer keeps its state" if not restore else ""
    ledger.judge("restore_dataloader", "translated", "training.reset_trainer_state", note)
    ledger.keep("reset_optimizer_state", "training.reset_optimizer")
    if ledger.value("reset_optimizer_state") and not reset:
        _bolt_on(ledger)
    if ledger.value("fast_forward_batches") is None:
        ledger.no_effect("fast_forward_batches", "off")
    else:
        ledger.keep("fast_forward_batches", "training.fast_forward_batches")
    if ledger.value("epoch") is not None and (reset or not restore):
        ledger.refuse("epoch", "a run that counts from zero begins with epoch 0 of its data")
    else:
        ledger.keep("epoch", "training.start_epoch")


def _bolt_on(ledger: Ledger) -> None:
    warmup, tokens = ledger.value("scheduler.t_warmup"), ledger.value("scheduler.units") == "tokens"
    if tokens:
        ledger.differ(
            "reset_optimizer_state",
            written=f"the learning rate is warmed up again over {warmup:g} tokens",
            executed="it is not, because tokens are compared with steps",
        )
    length = 0.0 if tokens and ledger.executed else float(warmup)
    ledger.put("training.bolt_on_warmup", length, "the original warms up again after a reset of the optimizer")


def translate_stopping(ledger: Ledger) -> None:
    """Sets when a run looks for a reason to stop."""
    ledger.keep("canceled_check_interval", "callbacks.cancellation.interval_steps")
    ledger.keep("extra_steps_after_cancel", "callbacks.cancellation.extra_steps")
    ledger.keep("time_limit", "callbacks.cancellation.time_limit_seconds")
    ledger.keep("early_stopping_factor", "callbacks.cancellation.early_stopping_factor")


def translate_reporting(ledger: Ledger) -> None:
    """Sets logging, trackers, measurements."""
    _wandb(ledger)
    ledger.keep("speed_monitor.window_size", "callbacks.speed_monitor.window_size")
    ledger.no_effect(
        "speed_monitor.gpu_flops_available", "the original never reads it; callbacks.speed_monitor.peak_flops"
    )
    ledger.no_effect("speed_monitor", "off in the original, always on here")
    if ledger.value("gen1_gc_interval") is None:
        ledger.translate("gen1_gc_interval", "callbacks.garbage_collector", None, "left to Python")
    else:
        ledger.keep("gen1_gc_interval", "callbacks.garbage_collector.interval_steps")
    if ledger.value("save_data_indices"):
        ledger.translate("save_data_indices", "callbacks.data_indices", {})
    else:
        ledger.translate("save_data_indices", "callbacks.data_indices", None)
    if ledger.value("torch_profiling"):
        ledger.translate("torch_profiling", "callbacks.profiler.skip_steps", 6, "three steps from the seventh on")
        ledger.settings["callbacks.profiler.num_steps"] = 3
    else:
        ledger.no_effect("torch_profiling", "off")
    if ledger.value("python_profiling"):
        ledger.translate("python_profiling", "callbacks.profiler.python", True, "the steps that the profiler traces")
    else:
        ledger.no_effect("python_profiling", "off")
    if ledger.value("module_outputs_save_steps"):
        ledger.keep("module_outputs_save_steps", "callbacks.model_outputs.steps")
    else:
        ledger.no_effect("module_outputs_save_steps", "off")
    ledger.no_effect("hf_datasets_cache_dir", "the original never reads it")


def _wandb(ledger: Ledger) -> None:
    ledger.no_effect("wandb", "off")
    reports = [key for key in ledger.given if key.startswith("wandb.")]
    interval = ledger.value("console_log_interval")
    if reports:
        interval = min(interval, ledger.value("wandb.log_interval"))
        ledger.put("training.report_to", ["wandb"], "the block wandb is present")
    ledger.translate(
        "console_log_interval", "training.logging_steps", interval, "one interval for console and trackers"
    )
    ledger.judge("wandb.log_interval", "translated", "training.logging_steps", "")
    variables = {
        "project": "WANDB_PROJECT",
        "entity": "WANDB_ENTITY",
        "group": "WANDB_RUN_GROUP",
        "tags": "WANDB_TAGS",
    }
    for name, variable in variables.items():
        ledger.no_effect(f"wandb.{name}", f"an account's matter: export {variable}")
    if ledger.value("wandb.name") == ledger.value("run_name"):
        ledger.judge("wandb.name", "kept", "name", "")
    else:
        ledger.no_effect("wandb.name", "runs are called by their name; export WANDB_NAME for another")
    ledger.no_effect("wandb.rank_zero_only", "always so")
    ledger.no_effect("wandb.log_artifacts", "the original never reads it")


def translate_launch(ledger: Ledger) -> str:
    """Judges how the original spreads a run over devices. Returns the file of `accelerate_configs/` that does it."""
    sharding = str(ledger.value("fsdp.sharding_strategy"))
    file = {"ddp": "ddp.yaml", "single": "single_gpu.yaml"}.get(
        ledger.value("distributed_strategy"), _SHARDINGS.get(sharding, "fsdp2.yaml")
    )
    ledger.no_effect("distributed_strategy", _LAUNCHED + file)
    notes = {
        "sharding_strategy": "fsdp_reshard_after_forward: "
        + ("false" if sharding in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2") else "true"),
        "wrapping_strategy": "every layer, the embedding and the head are sharded by themselves, or several layers "
        "together: training.fsdp_layers_per_unit",
        "use_orig_params": "always so",
        "precision": "gradients are summed in float32 as in `mixed`; as in `pure` with training.fsdp_reduce_in_half",
        "hybrid_sharding_num_model_replicas": "parallelism_config_dp_replicate_size in the launch file",
    }
    for name, note in notes.items():
        ledger.no_effect(f"fsdp.{name}", f"{_LAUNCHED}{file}; {note}" if name == "sharding_strategy" else note)
    for name in ("grad_sync_mode", "find_unused_params"):
        ledger.no_effect(f"ddp.{name}", "gradients are exchanged once per step, and every parameter is used")
    ledger.no_effect("single.device", "chosen at launch")
    for key in ("fsdp", "ddp", "single"):
        ledger.no_effect(key, _LAUNCHED + file)
    return file
