"""`--dry_run` with every pair of features on: a plan, or for the pairs that are known not to go together a refusal."""

import itertools
import json
from collections.abc import Iterable
from pathlib import Path

import pytest

import train_hf
from olmo_hf.errors import OlmoHfError
from olmo_hf.model.configuration_olmo import OlmoHfConfig
from olmo_hf.recipes import memory
from olmo_hf.recipes.step_memory import StepMemory, StepSettings, step_memory
from tests import features


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("features")
    features.prepare(directory)
    return directory


def refusal(here: Path, names: Iterable[str]) -> str:
    """What a dry run with these features says against it; empty: nothing."""
    config = features.write(here / "run.yaml", here, names, here / "pair.yaml")
    try:
        assert train_hf.main([str(config), "--dry_run"]) == 0
    except OlmoHfError as error:
        return str(error)
    return ""


def groups() -> list[list[str]]:
    """Random sets of features that go together, so many that every pair that does comes at least once."""
    left = {frozenset(pair) for pair in features.PAIRS} - features.REFUSED
    found: list[list[str]] = []
    while left:
        begin = sorted(min(left, key=sorted))
        drawn = [features.drawn(1_000 * len(found) + seed, begin=begin) for seed in range(8)]
        chosen = max(drawn, key=lambda names: len(left & pairs_in(names)))
        found.append(chosen)
        left -= pairs_in(chosen)
    return found


def pairs_in(names: list[str]) -> set[frozenset[str]]:
    return {frozenset(pair) for pair in itertools.combinations(names, 2)}


GROUPS = groups()


def test_every_pair_comes_in_some_set() -> None:
    found = set().union(*map(pairs_in, GROUPS))
    assert found | features.REFUSED >= {frozenset(pair) for pair in features.PAIRS}
    assert not found & features.REFUSED


@pytest.mark.parametrize("place", range(len(GROUPS)))
def test_features_that_go_together_are_planned(here: Path, place: int) -> None:
    assert refusal(here, GROUPS[place]) == ""


@pytest.mark.parametrize("pair", sorted(map(sorted, features.REFUSED)), ids=" + ".join)
def test_pairs_that_do_not_go_together_are_refused_in_words(here: Path, pair: list[str]) -> None:
    said = refusal(here, pair)
    assert "Traceback" not in said
    assert any(key.rpartition(".")[2] in said for name in pair for key in features.FEATURES[name])


@pytest.mark.parametrize("name", features.FEATURES)
def test_every_feature_alone(here: Path, name: str) -> None:
    assert refusal(here, [name]) == ""


@pytest.fixture
def steps_followed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of the same model in the same way needs the same memory: most pairs change neither."""
    known: dict[tuple[str, StepSettings], StepMemory] = {}

    def looked_up(config: OlmoHfConfig, settings: StepSettings) -> StepMemory:
        key = json.dumps(config.to_init_dict(), sort_keys=True), settings
        if key not in known:
            known[key] = step_memory(config, settings)
        return known[key]

    monkeypatch.setattr(memory, "step_memory", looked_up)


@pytest.mark.slow
@pytest.mark.usefixtures("steps_followed_once")
def test_every_pair_alone(here: Path) -> None:
    """Two features by themselves, so that no third one hides what they do to each other."""
    wrong = []
    for pair in features.PAIRS:
        said = refusal(here, pair)
        if bool(said) != (frozenset(pair) in features.REFUSED):
            wrong.append(f"{' + '.join(pair)}: {said or 'is planned'}")
    assert not wrong, "\n".join(wrong)
