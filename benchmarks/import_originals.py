"""Every configuration of the original trainer in a folder: what became of its keys, and whether it can be planned.

OLMO_HF_ORIGINAL_CONFIGS=FOLDER python benchmarks/import_originals.py [--as executed] [--save_folder=runs/x]

Counts keys kept, translated, without effect and refused; a key of the file without a verdict counts as dropped, which
must never be. Then `train_hf.py FILE --dry_run --skip_data` is run on the file as it is. Ends with status 1 if a key
was dropped or a file without refused keys cannot be planned. Settings in the original's style go to every file: one
that chooses among places of another machine needs them.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
VARIABLE = "OLMO_HF_ORIGINAL_CONFIGS"


def leaves(tree: Any, prefix: str = "") -> Iterator[str]:
    """Dotted names of everything a file says, found without the importer's own code; lists of values count once."""
    if isinstance(tree, dict) and tree:
        for name, item in tree.items():
            yield from leaves(item, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(tree, list) and any(isinstance(item, dict) for item in tree):
        for place, item in enumerate(tree):
            yield from leaves(item, f"{prefix}[{place}]")
    else:
        yield prefix


def dry_run(path: Path, words: list[str]) -> tuple[int, str]:
    """Exit status of planning the file as it is, and the last line of what was said."""
    command = [sys.executable, str(ROOT / "train_hf.py"), str(path), "--dry_run", "--skip_data", *words]
    found = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    lines = [line for line in found.stderr.splitlines() if line.strip() and not line.startswith("(set ")]
    return found.returncode, lines[-1].strip() if lines else ""


def main() -> int:
    """Import, count, plan, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--as", dest="mode", choices=("written", "executed"), default="written")
    options, words = parser.parse_known_args()
    folder = os.environ.get(VARIABLE)
    if folder is None or not Path(folder).is_dir():
        print(f"nothing to do: {VARIABLE} names no folder with configurations of the original trainer")
        return 0
    from olmo_hf.recipes.import_config import import_config
    from olmo_hf.recipes.ledger import STATUSES

    wrong = 0
    heads = "".join(f"{head:>{len(head) + 2}}" for head in ("keys", *STATUSES, "dropped", "dry run"))
    files = sorted(path for path in Path(folder).rglob("*") if path.suffix in (".yaml", ".yml"))
    width = max(len(path.stem) for path in files) if files else 4
    print(f"{'file':<{width}}{heads}")
    for path in files:
        imported = import_config(path, words, executed=options.mode == "executed")
        counts = imported.ledger.counts()
        keys = set(leaves(yaml.safe_load(path.read_text(encoding="utf-8"))))
        dropped = keys - imported.ledger.verdicts.keys()
        status, said = dry_run(path, words)
        numbers = "".join(
            f"{number:>{len(head) + 2}}"
            for number, head in zip(
                (len(keys), *counts.values(), len(dropped)), ("keys", *STATUSES, "dropped"), strict=True
            )
        )
        print(
            f"{path.stem:<{width}}{numbers}{'ok' if status == 0 else 'no':>9}  {'' if status == 0 else said}",
            flush=True,
        )
        wrong += bool(dropped) or (status != 0 and not counts["refused"])
        for one in imported.ledger.refused():
            print(f"{'':<{width}}  refused: {one.key}: {one.note}")
        for key in sorted(dropped):
            print(f"{'':<{width}}  dropped: {key}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
