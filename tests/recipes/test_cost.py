"""What devices send each other in a step, by hand."""

from dataclasses import replace
from pathlib import Path

import pytest

from olmo_hf.config_file import load_run
from olmo_hf.recipes.cost import exchange_bytes
from olmo_hf.recipes.memory import MemorySettings
from olmo_hf.recipes.plan import RunPlan, plan_run
from olmo_hf.recipes.table import memory_settings

CONFIGS = Path(__file__).parent.parent.parent / "configs"
TOTAL, LAYERS, EMBEDDING = 7_298_617_344, 6_476_529_664, 411_041_792
"""Parameters of the 7B, those of its layers, and of embedding and head each; the last norm has 4,096."""


@pytest.fixture(scope="module")
def planned() -> tuple[RunPlan, MemorySettings]:
    """The 7B on 8 devices, with 64 micro-batches of 2 instances."""
    plan = plan_run(load_run(CONFIGS / "olmo2_7b" / "stage1.yaml"), num_processes=8)
    settings = memory_settings(plan.run, plan.batch)
    assert (plan.batch.gradient_accumulation_steps, settings.step.half, settings.step.shards) == (64, True, 8)
    assert TOTAL == LAYERS + 2 * EMBEDDING + 4096
    return plan, settings


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"sharding": "full"}, 7 / 8 * 64 * (2 * (TOTAL + LAYERS) + 4 * TOTAL)),
        ({"sharding": "full", "defers_reduction": True}, 7 / 8 * (64 * 2 * (TOTAL + LAYERS) + 4 * TOTAL)),
        ({"sharding": "grad"}, 7 / 8 * (2 * TOTAL + 64 * 4 * TOTAL)),
        ({"sharding": "grad", "defers_reduction": True}, 7 / 8 * (2 + 4) * TOTAL),
        ({"sharding": "none", "shards": 1}, 2 * 7 / 8 * 4 * TOTAL),
        ({"sharding": "grad", "shards": 4, "defers_reduction": True}, 3 / 4 * (2 + 4) * TOTAL + 4 * TOTAL / 4),
    ],
    ids=["full", "full-deferred", "grad", "grad-deferred", "ddp", "hsdp"],
)
def test_bytes_sent(planned: tuple[RunPlan, MemorySettings], changes: dict[str, object], expected: float) -> None:
    plan, settings = planned
    step = replace(settings.step, **changes)  # type: ignore[arg-type]
    assert exchange_bytes(plan, replace(settings, step=step)) == pytest.approx(expected, rel=1e-9)
