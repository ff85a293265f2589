"""`olmo-hf push`: a checkpoint as a model on the Hub, with a card that says how it came about."""

import argparse
import re
from pathlib import Path
from typing import Any

from olmo_hf.errors import CheckpointError, ConfigError

HELP = "upload a checkpoint to the Hugging Face Hub with a model card"

# What makes a model; optimizer, random states and counters of the run stay at home.
MODEL_FILES = ("config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json")
CARD, LINEAGE = "README.md", "lineage.json"
TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "chat_template*", "*_olmo.py")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Command line of the verb."""
    parser.add_argument("checkpoint", type=Path, help="an unsharded checkpoint, or a run directory: its newest one")
    parser.add_argument("repository", help="name on the Hub, OWNER/NAME; made if it is not there")
    parser.add_argument("--private", action="store_true", help="a new repository is visible to its owner only")
    parser.add_argument("--license", help="identifier that goes into the card, for example apache-2.0")
    parser.add_argument(
        "--new-card", action="store_true", help=f"write the card anew even if the checkpoint has a {CARD} of its own"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the card and the files, upload nothing")


def run(options: argparse.Namespace) -> int:
    """Write the card and upload."""
    _check_license(options.license)
    checkpoint = _checkpoint(options.checkpoint)
    card = _card(checkpoint, options)
    patterns = (*MODEL_FILES, *TOKENIZER_FILES, LINEAGE)
    files = sorted({path for pattern in patterns for path in checkpoint.glob(pattern)})
    if options.dry_run:
        print(card)
        for path in files:
            print(f"{path.stat().st_size:>16,}  {path.name}")
        return 0
    _upload(options.repository, card, files, private=options.private)
    print(f"uploaded {len(files)} files and {CARD} to {options.repository}")
    return 0


def _check_license(name: str | None) -> None:
    if name is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", name):
        raise ConfigError(
            f"--license: found {name!r}, expected an identifier of the Hub such as apache-2.0, mit, cc-by-4.0 or other"
        )


def _card(checkpoint: Path, options: argparse.Namespace) -> str:
    """The card that lies in the checkpoint (an average's, or one that somebody wrote), else a new one."""
    from huggingface_hub import ModelCard
    from yaml import YAMLError

    from olmo_hf.model.card import write_card

    facts = _facts(checkpoint, options.repository, options.license)  # also looks for damage
    own = checkpoint / CARD
    if options.new_card or not own.is_file():
        return write_card(facts)
    try:
        text = own.read_text(encoding="utf-8")
        card = ModelCard(text.replace(f'from_pretrained("{checkpoint.name}"', f'from_pretrained("{facts.name}"'))
        if options.license is not None:
            card.data["license"] = options.license
        text = str(card)
    except (ValueError, TypeError, YAMLError) as error:
        raise CheckpointError(
            f"{own}: found no card that the Hub can read ({error}); correct its front matter or give --new-card"
        ) from error
    if (checkpoint / LINEAGE).is_file():
        text = _with_missing_sections(text, write_card(facts))
    return text


def _with_missing_sections(card: str, fresh: str) -> str:
    """The card of an average, with what it could not know when it was written: metrics and licence."""
    for heading in ("Metrics", "License"):
        section = re.search(rf"^## {heading}\n.*?(?=^## |\Z)", fresh, flags=re.MULTILINE | re.DOTALL)
        if section is not None and re.search(rf"^## {heading}\s*$", card, flags=re.MULTILINE) is None:
            card = f"{card.rstrip()}\n\n{section[0].rstrip()}\n"
    return card


def _checkpoint(path: Path) -> Path:
    found = (path / "latest").resolve() if (path / "latest").exists() else path
    if not (found / "config.json").is_file() or not list(found.glob("model*.safetensors")):
        raise CheckpointError(
            f"{path}: no unsharded checkpoint (config.json and model*.safetensors); a sharded one becomes a model by "
            "`olmo-hf convert`"
        )
    return found


def _facts(checkpoint: Path, name: str, license_name: str | None) -> Any:
    from olmo_hf.model.card import CardFacts, run_settings
    from olmo_hf.model.configuration_olmo import OlmoHfConfig
    from olmo_hf.training import commit

    step, tokens, versions = None, None, {}
    if (checkpoint / commit.MANIFEST).is_file():
        manifest = commit.require_whole(checkpoint)  # a damaged model is not published
        step, tokens, versions = manifest.step, manifest.tokens, manifest.versions
    return CardFacts(
        name=name,
        config=OlmoHfConfig.from_pretrained(checkpoint),
        step=step,
        tokens=tokens,
        settings=run_settings(checkpoint),
        metrics=_last_metrics(checkpoint.parent, step),
        versions=versions,
        license=license_name,
    )


def _last_metrics(run_dir: Path, step: int | None) -> dict[str, float]:
    """The newest value, up to the step, of the loss, and of every evaluation."""
    from olmo_hf.callbacks.json_lines import METRICS_FILE, read_json_lines

    metrics: dict[str, float] = {}
    if not (run_dir / METRICS_FILE).is_file():
        return metrics
    for row in read_json_lines(run_dir / METRICS_FILE):
        if step is None or row.get("step", 0) <= step:
            metrics |= {
                name: value
                for name, value in row.items()
                if name.startswith(("train/", "eval/")) and isinstance(value, int | float)
            }
    return metrics


def _upload(repository: str, card: str, files: list[Path], *, private: bool) -> None:
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    # What the Hub's errors are a kind of, from whichever client it uses: no connection is one of these too.
    client_errors = (kind for kind in HfHubHTTPError.__bases__ if issubclass(kind, Exception))
    failures: tuple[type[Exception], ...] = (*client_errors, HFValidationError, OfflineModeIsEnabled, OSError)
    operations = [CommitOperationAdd("README.md", card.encode())]
    operations += [CommitOperationAdd(path.name, str(path)) for path in files]
    try:
        api = HfApi()
        api.create_repo(repository, private=private, exist_ok=True)
        api.create_commit(repository, operations, commit_message="Upload model with olmo_hf")
    except failures as error:
        # The first line only: what follows can hold the headers of the request.
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{repository}: cannot upload ({reason}); check the name, the connection and `hf auth login`"
        ) from error
