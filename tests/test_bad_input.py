"""Bad input is refused before the first step, in words, and nothing is written."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import train_hf
from olmo_hf.data.manifest import Manifest, ManifestFile, write_manifest
from olmo_hf.errors import OlmoHfError
from tests import runs

Change = Callable[[dict[str, Any], Path], Any]


def set_at(*keys: str, value: Any) -> Change:
    """Sets a setting of the YAML."""

    def change(settings: dict[str, Any], directory: Path) -> None:
        for key in keys[:-1]:
            settings = settings.setdefault(key, {})
        settings[keys[-1]] = value

    return change


def tokens(content: np.ndarray | bytes) -> Change:
    """Replaces the token file."""

    def change(settings: dict[str, Any], directory: Path) -> None:
        data = content if isinstance(content, bytes) else content.tobytes()
        (directory / "tokens.npy").write_bytes(data)

    return change


def manifest(dtype: str) -> Change:
    """Puts a manifest beside the token file that says another type."""

    def change(settings: dict[str, Any], directory: Path) -> None:
        count = (directory / "tokens.npy").stat().st_size // 2
        file = ManifestFile("tokens.npy", num_tokens=count, num_documents=1, size_bytes=2 * count, sha256="0" * 64)
        write_manifest(directory, Manifest(dtype, 128, 0, 1, "tokenizer", "0" * 64, 1, count, (file,)))

    return change


def too_large_id(settings: dict[str, Any], directory: Path) -> None:
    content = np.fromfile(directory / "tokens.npy", dtype=np.uint16)
    content[5] = 777
    content.tofile(directory / "tokens.npy")


def another_run(settings: dict[str, Any], directory: Path) -> None:
    (directory / "run").mkdir()
    (directory / "run" / "config.yaml").write_text("name: someone-else\n")


def a_directory_with_other_things(settings: dict[str, Any], directory: Path) -> None:
    (directory / "run").mkdir()
    (directory / "run" / "thesis.tex").write_text("important")


def a_tokenizer_too_large(settings: dict[str, Any], directory: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"t{i}": i for i in range(300)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(directory / "tokenizer")
    settings["model"]["tokenizer"] = str(directory / "tokenizer")


CASES = {
    "unknown section": (set_at("trainning", "seed", value=1), [], ["trainning", "training"]),
    "unknown key": (set_at("training", "learning_rte", value=1), [], ["training.learning_rte", "learning_rate"]),
    "unknown nested key": (
        set_at("training", "scheduler", "warmpu", value=1),
        [],
        ["training.scheduler.warmpu", "warmup"],
    ),
    "unknown key on the command line": (None, ["--training.zloss_weight=1"], ["zloss_weight", "z_loss_weight"]),
    "a word that is no number": (
        set_at("training", "learning_rate", value="fast"),
        [],
        ["training.learning_rate", "fast", "number"],
    ),
    "missing file": (
        set_at("data", "paths", value=["/nowhere/at/all.npy"]),
        [],
        ["/nowhere/at/all.npy", "data.paths"],
    ),
    "empty file": (tokens(b""), [], ["tokens.npy", "empty"]),
    "shorter than a sequence": (tokens(np.arange(9, dtype=np.uint16)), [], ["tokens.npy", "9", "16"]),
    "half a token": (tokens(bytes(1001)), [], ["tokens.npy", "1,001", "uint16"]),
    "id beyond the vocabulary": (too_large_id, [], ["tokens.npy", "777", "5", "128"]),
    "dtype against the manifest": (manifest("uint32"), [], ["tokens.npy", "uint16", "uint32", "manifest"]),
    "unknown dtype": (set_at("data", "token_dtype", value="uint61"), [], ["data.token_dtype", "uint61", "uint16"]),
    "batch that does not divide": (
        set_at("training", "global_train_batch_size", value=9),
        [],
        ["training.global_train_batch_size", "9", "per_device_train_batch_size"],
    ),
    "another run": (another_run, [], ["someone-else", "output_dir"]),
    "other things": (a_directory_with_other_things, [], ["thesis.tex", "output_dir"]),
    "tokenizer too large": (a_tokenizer_too_large, [], ["model.config.vocab_size", "128", "300"]),
    "data smaller than a batch": (
        set_at("training", "global_train_batch_size", value=64),
        [],
        ["42", "64", "global_train_batch_size"],
    ),
    "warm-up above its peak": (
        set_at("training", "scheduler", "warmup_min_lr", value=1.0),
        [],
        ["warmup_min_lr", "learning_rate"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_refused_in_words(tmp_path: Path, case: str) -> None:
    change, words, expected = CASES[case]
    config = runs.write_run(tmp_path)
    if change is not None:
        settings = yaml.safe_load(config.read_text())
        change(settings, tmp_path)
        config.write_text(yaml.safe_dump(settings))
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    with pytest.raises(OlmoHfError) as caught:
        train_hf.main([str(config), *words])
    for part in expected:
        assert part in str(caught.value)
    after = sorted(str(path) for path in tmp_path.rglob("*") if path.name != ".lock")
    assert [path for path in after if path not in before] in ([], [str(tmp_path / "run")])


def test_all_problems_come_at_once(tmp_path: Path) -> None:
    config = runs.write_run(tmp_path)
    with pytest.raises(OlmoHfError) as caught:
        train_hf.main([str(config), "--training.sed=1", "--data.sequence_length=x", "--model.preset=olmo2_8b"])
    for part in ("training.sed", "data.sequence_length", "model.preset"):
        assert part in str(caught.value)


@pytest.mark.parametrize("written", ["1e-5", "1E-5", "'1e-5'", "0.00001"])
def test_numbers_are_numbers(tmp_path: Path, written: str) -> None:
    from olmo_hf.config_file import load_run

    config = runs.write_run(tmp_path)
    config.write_text(config.read_text().replace("z_loss_weight: 1.0e-05", f"z_loss_weight: {written}"))
    run = load_run(config, ["--training.scheduler.t_max=5e12"])
    assert run.training.z_loss_weight == 1e-5
    assert run.training.scheduler.t_max == 5e12
    assert isinstance(run.training.scheduler.t_max, float)
