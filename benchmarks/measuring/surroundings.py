"""Hardware, versions and commit, without which a figure means nothing."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "transformers", "accelerate", "datasets", "numpy")


def processor() -> str:
    """The name of the processor, and how many of them may be used."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    name = names[0].partition(":")[2].strip() if names else platform.processor() or "unknown processor"
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def memory() -> str:
    """Memory of the machine in GB."""
    return f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 1e9:.0f} GB"


def commit() -> str:
    """The commit that is measured, and whether files differ from it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True, cwd=ROOT, check=False).stdout.strip()

    found = git("rev-parse", "--short", "HEAD")
    return f"{found or 'unknown'}{' with changes' if git('status', '--porcelain', '--untracked-files=no') else ''}"


def versions() -> str:
    """Versions of what the figures depend on, without importing any of it."""

    def one(name: str) -> str:
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            return f"{name} missing"

    return ", ".join([f"Python {platform.python_version()}", *map(one, PACKAGES)])


def surroundings() -> list[str]:
    """Lines of Markdown for the head of a report."""
    return [
        f"- machine: {processor()}, {memory()}, Linux {platform.release()}",
        f"- versions: {versions()}",
        f"- commit: {commit()}",
    ]
