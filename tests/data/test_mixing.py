"""Mixes: exact counts, no repetition before it is needed, aligned masks, nothing else disturbed."""

import pickle
import random
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from olmo_hf.config_file import load_run, run_to_yaml
from olmo_hf.data.args import DataArgs, SourceArgs, data_problems
from olmo_hf.data.build import build_train_data
from olmo_hf.data.mixing import MixedDataset, describe_mix, plan_mix
from olmo_hf.data.order import DataPosition
from olmo_hf.errors import ConfigError, DataError

S = 4


def plan(sources: dict[str, SourceArgs], available: dict[str, int], mix_tokens: int | None = None) -> dict[str, int]:
    mix = plan_mix(sources, available, sequence_length=S, mix_tokens=mix_tokens)
    assert [source.name for source in mix] == sorted(sources)
    return {source.name: source.taken for source in mix}


def test_shares_add_up_exactly() -> None:
    thirds = {name: SourceArgs(weight=weight) for name, weight in (("a", 0.333), ("b", 0.333), ("c", 0.334))}
    enough = dict.fromkeys("abc", 1_000)
    assert plan(thirds, enough, 1_000 * S) == {"a": 333, "b": 333, "c": 334}
    assert sum(plan(thirds, enough, 1_001 * S).values()) == 1_001
    # As much as there is without repeating any: c is the first to be used up.
    assert plan(thirds, enough)["c"] in (999, 1_000)
    assert max(plan(thirds, enough).values()) <= 1_000


@settings(max_examples=200, deadline=None)
@given(
    weights=st.lists(st.integers(1, 1_000), min_size=1, max_size=6),
    total=st.integers(1, 5_000),
)
def test_every_share_is_within_one_of_exact(weights: list[int], total: int) -> None:
    sources = {f"s{i}": SourceArgs(weight=weight) for i, weight in enumerate(weights)}
    taken = plan(sources, dict.fromkeys(sources, 10), total * S)
    assert sum(taken.values()) == total
    for name, source in sources.items():
        assert source.weight is not None
        exact = Fraction(int(source.weight) * total, sum(weights))
        assert abs(taken[name] - exact) < 1


def test_repeat_tokens_and_weights_together() -> None:
    sources = {
        "all": SourceArgs(),
        "half": SourceArgs(repeat=0.5),
        "thrice": SourceArgs(repeat=3),
        "some": SourceArgs(tokens=7 * S + 1),
        "rest": SourceArgs(weight=1),
    }
    available = {"all": 10, "half": 11, "thrice": 2, "some": 100, "rest": 50}
    assert plan(sources, available, 100 * S) == {
        "all": 10,
        "half": 5,
        "thrice": 6,
        "some": 7,
        "rest": 100 - 10 - 5 - 6 - 7,
    }
    assert plan(sources, available)["rest"] == 50


@pytest.mark.parametrize(
    ("sources", "available", "mix_tokens", "said"),
    [
        ({"a": SourceArgs()}, {"a": 0}, None, "holds no whole instance"),
        ({"a": SourceArgs(), "b": SourceArgs(weight=1)}, {"a": 5, "b": 5}, 5 * S, "leaves nothing for the weighted"),
    ],
)
def test_what_makes_no_mix(sources: dict, available: dict, mix_tokens: int | None, said: str) -> None:
    with pytest.raises(DataError, match=said):
        plan(sources, available, mix_tokens)


@pytest.fixture
def section(tmp_path: Path) -> DataArgs:
    """Source x holds instances 0-19, y 100-104 in two files; the first token of an instance is its number."""
    paths = {}
    for name, numbers in (("x", range(20)), ("y1", range(100, 103)), ("y2", range(103, 105))):
        tokens = np.repeat(np.array(list(numbers), np.uint16), S)
        tokens.tofile(tmp_path / f"{name}.npy")
        (tokens % 2 == 0).tofile(tmp_path / f"{name}.mask")
        paths[name] = (str(tmp_path / f"{name}.npy"),), (str(tmp_path / f"{name}.mask"),)
    return DataArgs(
        sources={
            "y": SourceArgs(
                paths=paths["y1"][0] + paths["y2"][0], label_mask_paths=paths["y1"][1] + paths["y2"][1], repeat=2.6
            ),
            "x": SourceArgs(paths=paths["x"][0], label_mask_paths=paths["x"][1], repeat=0.5),
        },
        token_dtype="uint16",
        sequence_length=S,
    )


def build(section: DataArgs, seed: int = 3):
    return build_train_data(
        section,
        seed=seed,
        eos_token_id=None,
        pad_token_id=None,
        vocab_size=None,
        global_train_batch_size=1,
        start=DataPosition(),
    )


def test_an_epoch_of_a_mix(section: DataArgs) -> None:
    random.seed(5)
    np.random.seed(5)
    before = random.getstate(), np.random.get_state()[1].tolist()
    data, collator = build(section)
    mixed = data.dataset
    assert isinstance(mixed, MixedDataset)
    assert mixed.source_names == ["x", "y"]
    assert len(mixed) == 10 + 13
    batch = collator([data[k] for k in range(23)])
    first = batch["input_ids"][:, 0]
    of_x, of_y = first[batch["source"] == 0].tolist(), first[batch["source"] == 1].tolist()
    assert len(set(of_x)) == 10
    assert set(of_x) < set(range(20))
    # Twice everything, and three of the five a third time.
    assert sorted(of_y.count(n) for n in range(100, 105)) == [2, 2, 3, 3, 3]
    # The label mask of an instance is the one at its place.
    assert torch.equal(batch["label_mask"].all(dim=1), first % 2 == 0)
    assert torch.equal(batch["labels"] == -100, ~batch["label_mask"])
    assert all(mixed.locate(i).path.endswith("x.npy") == (mixed[i]["source"] == 0) for i in range(23))
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_the_draw_depends_on_the_seed_and_pickles(section: DataArgs) -> None:
    def drawn(seed: int) -> list[int]:
        data = build(section, seed)[0].dataset
        return [int(data[i]["input_ids"][0]) for i in range(10)]

    assert drawn(3) == drawn(3)
    assert drawn(3) != drawn(4)
    data = build(section)[0]
    assert pickle.loads(pickle.dumps(data)).instance_ids(0, 40).tolist() == data.instance_ids(0, 40).tolist()
    assert torch.equal(pickle.loads(pickle.dumps(data))[5]["input_ids"], data[5]["input_ids"])
    assert torch.equal(data.dataset[-1]["input_ids"], data.dataset[22]["input_ids"])
    with pytest.raises(IndexError):
        data.dataset[23]


def test_the_mix_is_told_before_training(section: DataArgs, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        data, _ = build(section)
    assert describe_mix(data.dataset.mix, S) in caplog.text
    assert "an epoch of the mix: 23 instances, 92 tokens" in caplog.text
    assert "10 of           20 instances   43.48 %  x 0.500" in caplog.text


def test_a_mix_in_yaml_keeps_its_meaning(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        "name: x\nmodel: {preset: olmo2_1b}\n"
        "training: {max_duration: 5, global_train_batch_size: 8}\n"
        "data:\n  sources:\n    web: {paths: a.npy, weight: 0.9}\n    code: {paths: [b.npy], repeat: 2}\n"
    )
    run = load_run(tmp_path / "c.yaml")
    assert run.data.sources == {
        "web": SourceArgs(paths=("a.npy",), weight=0.9),
        "code": SourceArgs(paths=("b.npy",), repeat=2.0),
    }
    (tmp_path / "again.yaml").write_text(run_to_yaml(run))
    assert load_run(tmp_path / "again.yaml") == run


def test_what_a_section_must_not_say(section: DataArgs) -> None:
    one = DataArgs(
        sources={"a": SourceArgs(paths=("x",), weight=1, repeat=2), "b": SourceArgs(repeat=0)},
        mix_tokens=5,
        order="random_offsets",
        shuffle=False,
        label_mask_paths=("m",),
    )
    said = "\n".join(data_problems(one, "data"))
    for part in (
        "data.sources.a: found weight and repeat, expected one of",
        "data.sources.b.repeat: found 0, expected more than 0",
        "data.sources.b.paths: is empty",
        "data.order: found 'random_offsets' with `data.shuffle: false`",
        "data.order: found 'random_offsets' with `data.sources`",
        "data.label_mask_paths: given beside `sources`",
    ):
        assert part in said
    only = DataArgs(sources={"a": SourceArgs(paths=("x",))}, mix_tokens=5)
    assert list(data_problems(only, "d")) == [
        "d.mix_tokens: is set, but no source has a weight; remove it or give weights"
    ]
    assert list(data_problems(section, "data")) == []


def test_random_offsets_have_no_epochs(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        "name: x\nmodel: {preset: olmo2_1b}\ntraining: {max_duration: 2ep, global_train_batch_size: 8}\n"
        "data: {paths: a.bin, order: random_offsets}\n"
    )
    with pytest.raises(ConfigError, match=r"training\.max_duration: found '2ep', but .* has no epochs"):
        load_run(tmp_path / "c.yaml")


def test_sources_beside_paths_are_refused(section: DataArgs) -> None:
    both = DataArgs(paths=("a",), sources=section.sources, token_dtype="uint16", sequence_length=S)
    with pytest.raises(DataError, match=r"data\.paths: is set beside data\.sources"):
        build(both)
    nothing = DataArgs(sources={"z": SourceArgs()}, token_dtype="uint16", sequence_length=S)
    with pytest.raises(DataError, match=r"data\.sources\.z\.paths: is empty"):
        build(nothing)
