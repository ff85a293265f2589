"""`olmo-hf import-config`: a configuration of the original OLMo trainer becomes one of ours."""

import argparse
import sys
from pathlib import Path

from olmo_hf.errors import ConfigError

HELP = "translate a configuration of the original OLMo trainer, with a verdict on every key"

TAKES_FURTHER_SETTINGS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the verb; settings of the original may follow in its own style."""
    parser.add_argument("original", type=Path, metavar="ORIGINAL.yaml", help="a configuration of the original trainer")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="OURS.yaml", help="file to write")
    parser.add_argument("--strict", action="store_true", help="write nothing if a key is refused or something is open")
    parser.add_argument(
        "--as",
        dest="mode",
        choices=("written", "executed"),
        default="written",
        help="where the original did something else than its file says, which of the two (default: %(default)s)",
    )
    parser.add_argument("--report", type=Path, metavar="FILE.json", help="write all verdicts for programs to read")
    parser.add_argument("--quiet", action="store_true", help="print only what was refused")
    parser.add_argument("--force", action="store_true", help="replace OURS.yaml if it is there")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a setting of the original"
    )
    parser.epilog = "Settings in the original's style may follow: --optimizer.learning_rate=9e-4, --save_overwrite."


def run(namespace: argparse.Namespace) -> int:
    """Translates, writes, reports. Returns 0 when a file was written."""
    from olmo_hf.recipes.import_config import import_config, report_json, report_lines, to_yaml

    overrides = [*namespace.set, *namespace.further]
    imported = import_config(namespace.original, overrides, executed=namespace.mode == "executed")
    if namespace.report is not None:
        namespace.report.write_text(report_json(imported), encoding="utf-8")
    for line in report_lines(imported, every_key=not namespace.quiet):
        print(line)
    if namespace.strict and (imported.ledger.refused() or imported.open_problems):
        raise ConfigError(
            f"{namespace.original}: not translated as a whole, see above, and nothing was written; change what is "
            "refused with --set KEY=VALUE, or leave --strict out"
        )
    if namespace.output.exists() and not namespace.force:
        raise ConfigError(f"{namespace.output}: exists; give another -o, or --force to replace it")
    namespace.output.parent.mkdir(parents=True, exist_ok=True)
    namespace.output.write_text(to_yaml(imported, namespace.output), encoding="utf-8")
    print(f"wrote {namespace.output}", file=sys.stderr)
    return 0
