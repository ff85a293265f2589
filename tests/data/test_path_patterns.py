"""Which files a list of paths and globs names."""

import glob
import os
from pathlib import Path

import pytest

from olmo_hf.data.path_patterns import expand_paths
from olmo_hf.errors import DataError


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("a/1.npy", "a/2.npy", "a/b/3.npy", "a/b/c/4.npy", "a/.hidden/5.npy", "a/日本 [x]/ü😀.npy", "6.npy"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


PATTERNS = (
    "*.npy",
    "a/*.npy",
    "**/*.npy",
    "a/**/*.npy",
    "a/**",
    "**",
    "a/**/c/*",
    "*/**/[34].npy",
    "a/b*/**/*.npy",
    "**/b/**/4*",
)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("absolute", [False, True])
def test_globs_mean_what_they_mean_in_python(tree: Path, pattern: str, absolute: bool) -> None:
    pattern = str(tree / pattern) if absolute else pattern
    expected = sorted({path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path)})
    assert expected
    assert expand_paths([pattern]) == expected


def test_links_that_lead_back_add_nothing(tree: Path) -> None:
    """Python's own globs give every file forty times here, and with two such links never end."""
    before = expand_paths(["a/**/*.npy"])
    for number in range(3):
        (tree / "a" / "b" / f"back{number}").symlink_to(tree / "a", target_is_directory=True)
    (tree / "a" / "itself").symlink_to("itself")
    assert expand_paths(["a/**/*.npy"]) == before


def test_a_linked_folder_counts(tree: Path) -> None:
    (tree / "elsewhere").mkdir()
    (tree / "elsewhere" / "7.npy").touch()
    (tree / "a" / "link").symlink_to(tree / "elsewhere", target_is_directory=True)
    assert "a/link/7.npy" in expand_paths(["a/**/*.npy"])


def test_order_and_repetition_are_kept(tree: Path) -> None:
    assert expand_paths(["6.npy", "a/*.npy", "6.npy"]) == ["6.npy", "a/1.npy", "a/2.npy", "6.npy"]


def test_a_name_with_glob_characters_is_a_name(tree: Path) -> None:
    assert expand_paths(["a/日本 [x]/ü😀.npy"]) == ["a/日本 [x]/ü😀.npy"]


def test_what_names_no_file(tree: Path) -> None:
    with pytest.raises(DataError, match=r"none\*: matches no file \(looked from .*\); correct data\.paths"):
        expand_paths(["none*"])
    with pytest.raises(DataError, match=r"a/: is a directory, expected token files; write a/\*\.npy"):
        expand_paths(["a/"])
