"""Plans: the figures of published runs and of the half billion, from the shipped configurations."""

from pathlib import Path

import numpy as np
import pytest

from olmo_hf.callbacks.peak_flops import GPU_PEAK_FLOPS
from olmo_hf.config_file import load_run
from olmo_hf.data.args import DataArgs
from olmo_hf.errors import ConfigError
from olmo_hf.recipes.cost import speed, speed_at_utilisation, speed_for_hours, total_flops
from olmo_hf.recipes.plan import RunPlan, curve_of, known_instances, learning_rate_rows, milestones, plan_run

CONFIGS = Path(__file__).parent.parent.parent / "configs"


def plan_of(name: str, num_processes: int = 1, *words: str) -> RunPlan:
    return plan_run(load_run(CONFIGS / name, words), num_processes=num_processes)


# Parameters, steps and tokens per step as published with the models.
PUBLISHED = {
    "olmo2_1b/stage1.yaml": (1_484_916_736, 1_907_359, 2_097_152),
    "olmo2_7b/stage1.yaml": (7_298_617_344, 928_646, 4_194_304),
    "olmo2_13b/stage1.yaml": (13_716_198_400, 596_057, 8_388_608),
    "olmo2_1b/stage2_seed42.yaml": (1_484_916_736, 23_842, 2_097_152),
    "olmo2_7b/stage2_seed42.yaml": (7_298_617_344, 11_921, 4_194_304),
    "olmo2_7b/stage2_seed42069.yaml": (7_298_617_344, 11_921, 4_194_304),
    "olmo2_7b/stage2_seed666.yaml": (7_298_617_344, 11_921, 4_194_304),
    "olmo2_13b/stage2_seed1110_100b.yaml": (13_716_198_400, 11_921, 8_388_608),
    "olmo2_13b/stage2_seed2662_300b.yaml": (13_716_198_400, 35_763, 8_388_608),
    "olmo1/olmo1_1b.yaml": (1_176_764_416, 739_328, 4_194_304),
    "olmo1/olmo1_7b.yaml": (6_888_095_744, 476_838, 4_194_304),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_runs(name):
    plan = plan_of(name)
    assert (plan.count.total, plan.batch.max_steps, plan.batch.tokens_per_step) == PUBLISHED[name]


@pytest.mark.parametrize(
    ("name", "step", "rate"),
    [
        ("olmo2_7b/stage1.yaml", 928_646, 6.1351e-5),
        ("olmo2_1b/stage1.yaml", 1_907_359, 7.4487e-5),
        ("olmo2_13b/stage1.yaml", 596_057, 9e-5),
        ("olmo2_7b/stage2_seed42.yaml", 11_921, 0.0),
        ("olmo2_13b/stage1.yaml", 1_000, 9e-4),
    ],
)
def test_learning_rates_of_published_runs(name, step, rate):
    plan = plan_of(name)
    assert curve_of(plan)(step, step * plan.batch.tokens_per_step) == pytest.approx(rate, rel=2e-5, abs=1e-12)


def test_the_half_billion():
    plan = plan_of("half_billion/four_a100.yaml", 4)
    batch = plan.batch
    assert (batch.tokens_per_step, batch.max_steps, batch.warmup.steps) == (1_048_576, 9_537, 190)
    assert (batch.gradient_accumulation_steps, batch.per_device_train_batch_size) == (16, 8)
    assert plan.count.total == 502_230_528
    expected = {
        1: "1.58e-06",
        96: "1.52e-04",
        190: "3.00e-04",
        2385: "2.65e-04",
        4769: "1.69e-04",
        7153: "7.11e-05",
        9537: "3.00e-05",
    }
    assert milestones(batch) == list(expected)
    curve = curve_of(plan)
    assert {step: f"{curve(step, step * batch.tokens_per_step):.2e}" for step in expected} == expected
    assert "1.579e-06 at 1, 1.516e-04 at 96, 3.000e-04 at 190, 2.649e-04 at 2,385" in learning_rate_rows(plan)[0][1]


@pytest.mark.parametrize(("hours", "tokens", "share"), [(12, 231_481, 55.9), (17, 163_399, 39.5), (24, 115_741, 27.9)])
def test_hours_of_the_half_billion(hours, tokens, share):
    plan = plan_of("half_billion/four_a100.yaml", 4)
    found = speed_for_hours(plan, hours=hours, peak_flops=4 * GPU_PEAK_FLOPS["A100"])
    assert round(found.tokens_per_second) == tokens
    assert round(100 * found.utilisation_6n, 1) == share
    assert found.utilisation > found.utilisation_6n  # attention counts too


def test_speeds_agree_with_each_other():
    plan = plan_of("half_billion/four_a100.yaml", 4)
    peak = 4 * GPU_PEAK_FLOPS["A100"]
    assumed = speed_at_utilisation(plan, utilisation=0.4, peak_flops=peak)
    assert assumed.utilisation == pytest.approx(0.4)
    assert assumed.hours * 3600 * 0.4 * peak == pytest.approx(total_flops(plan))
    again = speed(plan, tokens_per_second=assumed.tokens_per_second, peak_flops=peak)
    assert again == assumed


def test_decay_of_the_half_billion_is_by_dimension():
    run = load_run(CONFIGS / "half_billion" / "four_a100.yaml")
    assert run.training.weight_decay_rule == "by_dimension"
    assert run.data.order == "random_offsets"


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.yaml")), ids=lambda path: str(path.relative_to(CONFIGS)))
def test_every_shipped_run_has_a_plan(path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # neither data nor tokenizer are there
    rows = dict(plan_run(load_run(path), num_processes=1).rows())
    assert {"model", "batch", "run", "learning rate is at its floor from", "data"} <= rows.keys()


def test_local_data_are_counted(tmp_path):
    for name, tokens in (("a.npy", 100), ("b.npy", 70)):
        np.zeros(tokens, dtype=np.uint16).tofile(tmp_path / name)
    args = DataArgs(paths=(str(tmp_path / "*.npy"),), token_dtype="uint16", sequence_length=32)
    assert known_instances(args)[0] == 3 + 2


def test_a_mix_is_counted_from_its_published_tokens():
    count, note = known_instances(DataArgs(mix="olmo2_stage1", sequence_length=4096))
    assert count == 928_646 * 1024
    assert "as published" in note


def test_data_elsewhere_are_not_asked_for():
    count, note = known_instances(DataArgs(paths=("https://no.such.host.invalid/a.npy",), token_dtype="uint16"))
    assert count is None
    assert "another machine" in note


def test_epochs_of_unknown_data_have_no_length(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="length of an epoch is not known"):
        plan_of("half_billion/small.yaml", 1, "--training.max_duration=1ep", "--data.order=shuffle")
