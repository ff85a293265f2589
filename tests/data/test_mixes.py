"""Named mixes: what the lists hold, how their notation is read, and that they are the published ones."""

import hashlib
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from olmo_hf.data.args import DataArgs
from olmo_hf.data.checks import check_data, resolve_files
from olmo_hf.data.mixes import expand_braces, mix_names, read_mix
from olmo_hf.data.token_checks import TokenLimits
from olmo_hf.errors import DataError

# Name: entries, different files, first digits of the SHA-256 of all entries joined by newlines. The order counts: it
# numbers the instances.
LISTS = {
    "olmo2_stage1": (1122, 1117, "f8a78a70c1f7d4f2"),
    "olmo2_stage2_50b": (576, 576, "5164c43454b19f88"),
    "olmo2_stage2_100b": (1253, 697, "97379cf9500caf54"),
    "dolma17": (1033, 1031, "951874a4e6119224"),
    "dolma17_tiny": (1027, 999, "1bd86230be950022"),
    "dolma15": (249, 249, "d93e041b41c99dac"),
    "dolma15_sample": (443, 443, "7f491003e9b970a9"),
}

# Published configuration that lists the same files, where the list was taken from one.
PUBLISHED_IN = {
    "olmo2_stage1": "OLMo2-7B-stage1.yaml",
    "olmo2_stage2_50b": "OLMo2-7B-stage2-seed42.yaml",
    "olmo2_stage2_100b": "OLMo2-13B-stage2-seed1110-100B.yaml",
    "dolma17": "OLMo-7B-0724.yaml",
    "dolma17_tiny": "OLMo-20M.yaml",
    "dolma15": "OLMo-1B.yaml",
}


def test_every_list_is_checked_here():
    assert mix_names() == sorted(LISTS)


@pytest.mark.parametrize("name", LISTS)
def test_a_list_is_what_was_published(name):
    paths = read_mix(name).relative_paths
    digest = hashlib.sha256("\n".join(paths).encode()).hexdigest()
    assert (len(paths), len(set(paths)), digest[:16]) == LISTS[name]


@pytest.mark.parametrize("name", PUBLISHED_IN)
@pytest.mark.skipif("OLMO_HF_ORIGINAL_CONFIGS" not in os.environ, reason="OLMO_HF_ORIGINAL_CONFIGS names no folder")
def test_a_list_equals_the_file_of_the_original(name):
    published = Path(os.environ["OLMO_HF_ORIGINAL_CONFIGS"]) / PUBLISHED_IN[name]
    listed = OmegaConf.to_container(OmegaConf.load(published), resolve=False)["data"]["paths"]
    bases = {path.partition("preprocessed/")[0] for path in listed}
    assert len(bases) == 1
    assert read_mix(name).paths(bases.pop()) == listed


def test_the_sources_of_stage_one():
    sources = Counter(path.split("/")[1] for path in read_mix("olmo2_stage1").relative_paths)
    assert sources == {"dclm": 945, "starcoder": 100, "proof-pile-2": 49, "pes2o": 26, "olmo-mix": 2}
    repeated = Counter(read_mix("olmo2_stage1").relative_paths)
    twice = [path.rsplit("/", 1)[1] for path, count in repeated.items() if count == 2]
    assert twice == [f"part-104-{number:05d}.npy" for number in range(5)]


def test_small_sources_of_stage_two_are_repeated():
    count = Counter(path.rsplit("/part-", 1)[0] for path in read_mix("olmo2_stage2_100b").relative_paths)
    students = next(source for source in count if "mind-2students" in source)
    assert count[students] == 276
    assert len({p for p in read_mix("olmo2_stage2_100b").relative_paths if p.startswith(students)}) == 92


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("olmo2_stage1", 928_646 * 1024 * 4096),
        ("olmo2_stage2_50b", 51_472_040_000),
        ("olmo2_stage2_100b", 112_944_080_000),
        ("dolma15", 739_328 * 2048 * 2048),
        ("dolma15_sample", 2 * 10**12),
        ("dolma17", 1_819_467_000_000),
        ("dolma17_tiny", 1_811_127_000_000),
    ],
)
def test_token_totals(name, tokens):
    assert read_mix(name).num_tokens == tokens


def test_braces():
    assert expand_braces("a-{08..11}-{x,y}.npy")[:3] == ["a-08-x.npy", "a-08-y.npy", "a-09-x.npy"]
    assert expand_braces("p-{3,0..1,2}") == ["p-3", "p-0", "p-1", "p-2"]
    assert expand_braces("plain.npy") == ["plain.npy"]


def test_an_unknown_mix_is_named():
    with pytest.raises(DataError, match=r"data\.mix: found 'olmo2'.*olmo2_stage1"):
        resolve_files(DataArgs(mix="olmo2"))


def test_a_mix_says_the_files_and_their_type():
    found = resolve_files(DataArgs(mix="olmo2_stage1", mix_base="s3://bucket/"))
    assert found.paths[0].startswith("s3://bucket/preprocessed/proof-pile-2/")
    assert found.token_dtype == "uint32"
    assert resolve_files(DataArgs(mix="dolma17")).paths[0].startswith("https://olmo-data.org/preprocessed/")


@pytest.mark.parametrize(
    "args",
    [DataArgs(mix="dolma15", paths=("a.npy",)), DataArgs(paths=("a.npy",), mix_base="s3://bucket")],
    ids=["two sources", "a base without a mix"],
)
def test_contradictions_are_refused(args):
    with pytest.raises(DataError, match="remove"):
        resolve_files(args)


def test_check_none_looks_at_sizes_only(tmp_path):
    path = tmp_path / "tokens.npy"
    np.full(64, 999, dtype=np.uint16).tofile(path)
    limits = TokenLimits(vocab_size=100, eos_token_id=None)
    args = DataArgs(paths=(str(path),), token_dtype="uint16", sequence_length=8)
    assert check_data(args, limits=limits)
    assert not check_data(
        DataArgs(paths=args.paths, token_dtype="uint16", sequence_length=8, check="none"), limits=limits
    )
    short = DataArgs(paths=args.paths, token_dtype="uint16", sequence_length=128, check="none")
    assert check_data(short, limits=limits)
