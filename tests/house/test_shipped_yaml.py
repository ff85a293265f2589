"""Every YAML file that is shipped can be used."""

import math
import re
from pathlib import Path

import pytest
import yaml

from olmo_hf.config_file import load_run, run_to_yaml
from olmo_hf.evaluation.tasks.table import find_tasks

ROOT = Path(__file__).parent.parent.parent
RUNS = sorted((ROOT / "configs").rglob("*.yaml"))
LAUNCHES = sorted((ROOT / "accelerate_configs").glob("*.yaml"))

# Accelerate takes unknown keys below `fsdp_config` without a word, and ignores those of version 1 under version 2.
FSDP2_KEYS = {
    "fsdp_version",
    "fsdp_reshard_after_forward",
    "fsdp_auto_wrap_policy",
    "fsdp_transformer_layer_cls_to_wrap",
    "fsdp_min_num_params",
    "fsdp_state_dict_type",
    "fsdp_cpu_ram_efficient_loading",
    "fsdp_offload_params",
    "fsdp_activation_checkpointing",
}


def opening_comment(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").split("\n")
    return "\n".join(lines[: next(place for place, line in enumerate(lines) if not line.startswith("#"))])


def test_there_are_files_to_check():
    assert RUNS
    assert LAUNCHES


@pytest.mark.parametrize("path", RUNS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_run_loads_and_is_the_same_when_written_and_loaded_again(path, tmp_path):
    run = load_run(path)
    saved = tmp_path / "config.yaml"
    saved.write_text(run_to_yaml(run))
    assert load_run(saved) == run
    assert run_to_yaml(load_run(saved)) == run_to_yaml(run)
    assert f"train_hf.py {path.relative_to(ROOT)}" in opening_comment(path), "open it with its launch line"
    assert "Source: " in opening_comment(path), "say where it comes from"
    (launch,) = set(re.findall(r"accelerate_configs/[\w.-]+", opening_comment(path)))
    assert (ROOT / launch).is_file()


@pytest.mark.parametrize("path", RUNS, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_of_runs_are_unique(path):
    assert [other for other in RUNS if load_run(other).name == load_run(path).name] == [path]


@pytest.mark.parametrize("path", LAUNCHES, ids=lambda path: path.name)
def test_a_launch_config_is_one_for_accelerate(path):
    from accelerate.commands.config.config_args import load_config_from_file

    load_config_from_file(str(path))
    text = path.read_text(encoding="utf-8")
    config = yaml.safe_load(text)
    assert config["mixed_precision"] == "no", "the precision is the run's: training.bf16"
    assert config["distributed_type"] != "MULTI_CPU", "would start one process without a word"
    line = rf"--config_file accelerate_configs/{re.escape(path.name)}( --\w+ \S+)* train_hf\.py "
    assert re.search(line, opening_comment(path)), "open it with its launch line"
    assert "Assumes" in opening_comment(path)
    if config["num_machines"] > 1:
        assert config["rdzv_backend"] == "c10d"
        assert config["same_network"] is False, "Accelerate would not pass the address on to c10d"
    if "parallelism_config" in config:
        sizes = config["parallelism_config"]
        assert sizes.keys() == {f"parallelism_config_{name}_size" for name in ("dp_replicate", "dp_shard", "tp", "cp")}
        assert math.prod(sizes.values()) == config["num_processes"]
        assert config["distributed_type"] == "FSDP"
        refused = sizes["parallelism_config_tp_size"] * sizes["parallelism_config_cp_size"] > 1
        assert ("NOT SUPPORTED" in opening_comment(path)) == refused
    if config["distributed_type"] == "FSDP":
        assert config["fsdp_config"]["fsdp_cpu_ram_efficient_loading"] is False, "is refused at launch"
        fsdp = config["fsdp_config"]
        assert fsdp.keys() <= FSDP2_KEYS
        assert fsdp["fsdp_version"] == 2
        layer = fsdp["fsdp_transformer_layer_cls_to_wrap"]
        modeling = (ROOT / "olmo_hf" / "model" / "layers_olmo.py").read_text(encoding="utf-8")
        assert re.search(rf"^class {layer}\(", modeling, re.M)


@pytest.mark.parametrize("path", RUNS, ids=lambda path: str(path.relative_to(ROOT / "configs")))
def test_every_task_of_a_shipped_run_exists(path):
    for evaluator in load_run(path).evaluation.evaluators:
        if evaluator.type == "downstream":
            assert len(find_tasks(evaluator.tasks)) == len(evaluator.tasks)
