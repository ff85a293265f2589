"""What an accelerate config asks for, against what the tested versions can do."""

from pathlib import Path

import pytest
import yaml

from olmo_hf.distributed import check_launch, launched_sharding
from olmo_hf.errors import ConfigError

CONFIGS = Path(__file__).parents[1] / "accelerate_configs"


def environment(name: str, **changes: str) -> dict[str, str]:
    """What `accelerate launch` makes of a file."""
    config = yaml.safe_load((CONFIGS / name).read_text(encoding="utf-8"))
    found = {"WORLD_SIZE": str(config["num_processes"]), "MASTER_ADDR": "127.0.0.1"}
    if config["distributed_type"] == "FSDP":
        fsdp = config["fsdp_config"]
        found |= {
            "ACCELERATE_USE_FSDP": "true",
            "FSDP_VERSION": str(fsdp["fsdp_version"]),
            "FSDP_RESHARD_AFTER_FORWARD": str(fsdp["fsdp_reshard_after_forward"]).lower(),
            "FSDP_CPU_RAM_EFFICIENT_LOADING": str(fsdp["fsdp_cpu_ram_efficient_loading"]).lower(),
        }
    if "parallelism_config" in config:
        found["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
        found |= {name.upper(): str(size) for name, size in config["parallelism_config"].items()}
    return found | changes


def problems(*args: str, **changes: str) -> list[str]:
    try:
        check_launch(environment(*args, **changes))
    except ConfigError as error:
        return error.problems
    return []


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_every_file_is_taken_or_says_that_it_is_not(path: Path) -> None:
    assert bool(problems(path.name)) == ("NOT SUPPORTED" in path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fsdp2_tensor_parallel.yaml", ("tp_size: found 2, expected 1", "fsdp2.yaml")),
        ("fsdp2_context_parallel.yaml", ("cp_size: found 2, expected 1", "activation_checkpointing")),
    ],
)
def test_what_is_not_supported_is_refused_in_words(name: str, words: tuple[str, ...]) -> None:
    (problem,) = problems(name)
    assert all(word in problem for word in words)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"RANK": "x", "WORLD_SIZE": "-1"}, ["RANK: found 'x'", "WORLD_SIZE: found '-1'"]),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, ["RANK: found 2 with WORLD_SIZE 2"]),
        ({"RANK": "0", "WORLD_SIZE": "2"}, ["MASTER_ADDR: not set, though WORLD_SIZE is 2"]),
        ({"WORLD_SIZE": "", "ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, ["WORLD_SIZE: found ''"]),
    ],
)
def test_an_environment_that_no_launcher_made(given: dict[str, str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        check_launch(given)
    assert [problem[: len(start)] for problem, start in zip(caught.value.problems, words, strict=True)] == words


def test_sizes_that_are_not_the_number_of_processes() -> None:
    (problem,) = problems("hsdp.yaml", WORLD_SIZE="4")
    assert "dp_replicate 2 x dp_shard 4 = 8, but 4 processes take part" in problem


def test_units_by_size_are_refused() -> None:
    (problem,) = problems("fsdp2.yaml", FSDP_AUTO_WRAP_POLICY="SIZE_BASED_WRAP")
    assert "training.fsdp_layers_per_unit" in problem


def test_all_problems_at_once() -> None:
    changes = {"FSDP_VERSION": "1", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "1"}
    found = problems("hsdp.yaml", **changes)
    assert len(found) == 4
    assert [
        word
        for word in ("fsdp_version", "ram_efficient", "2 = 2, but 8", "shard_size: found 1")
        if word in "\n".join(found)
    ] == ["fsdp_version", "ram_efficient", "2 = 2, but 8", "shard_size: found 1"]


def test_a_launch_without_a_launcher_has_no_problems() -> None:
    check_launch({})


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ddp.yaml", ("none", 1)),
        ("fsdp2.yaml", ("full", 1)),
        ("fsdp2_shard_grad_op.yaml", ("grad", 1)),
        ("nodes_hsdp.yaml", ("full", 2)),
    ],
)
def test_a_plan_knows_how_it_was_launched(name: str, expected: tuple[str, int]) -> None:
    assert launched_sharding(environment(name)) == expected
