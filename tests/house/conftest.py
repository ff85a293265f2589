"""What the rules of the house look at: the repository's own files."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
IGNORED = {".git", ".venv", "__pycache__", "build", "dist", "runs", "data", "wandb"}


def is_ours(path: Path) -> bool:
    """Whether a file belongs to the repository (and is not built, downloaded or left by a run)."""
    parts = path.relative_to(ROOT).parts
    top_is_ignored = parts[0] in IGNORED
    return not top_is_ignored and not any(
        part == "__pycache__" or part.endswith(("_cache", ".egg-info")) or part == ".hypothesis" for part in parts
    )


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def files() -> list[Path]:
    """All files of the repository."""
    return sorted(path for path in ROOT.rglob("*") if path.is_file() and is_ours(path))


@pytest.fixture(scope="session")
def modules(files: list[Path]) -> dict[Path, ast.Module]:
    """Every Python file of the package, and `train_hf.py`, parsed; keys are relative to the repository."""
    chosen = [
        p for p in files if p.suffix == ".py" and (p.is_relative_to(ROOT / "olmo_hf") or p.name == "train_hf.py")
    ]
    return {path.relative_to(ROOT): ast.parse(path.read_text(encoding="utf-8")) for path in chosen}
