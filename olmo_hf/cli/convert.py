"""`olmo-hf convert`: checkpoints of the original trainer, of Hugging Face and of our runs, one into another."""

import argparse
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from olmo_hf.errors import ConversionError

if TYPE_CHECKING:
    from olmo_hf.model.conversion.convert import Checkpoint

HELP = "convert a checkpoint: original OLMo <-> Hugging Face, or sharded -> unsharded"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Command line of the verb."""
    parser.add_argument("source", type=Path, help="checkpoint directory to read; it is never changed")
    parser.add_argument("target", type=Path, help="directory to write; must not exist")
    parser.add_argument(
        "--to",
        choices=("huggingface", "original"),
        help="what to write; left out: Hugging Face from the original or from shards, else the original",
    )
    parser.add_argument("--tokenizer", help="directory, tokenizer.json or hub id; left out: the source's own")
    parser.add_argument(
        "--vocab-padding",
        choices=("keep", "trim"),
        default="keep",
        help="keep the rows of the embedding beyond the tokenizer's ids (default), or cut them off",
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="type of the weights written")
    parser.add_argument("--no-optimizer", action="store_true", help="leave optimizer state out")
    parser.add_argument("--no-verify", action="store_true", help="do not compare logits of source and target")
    parser.add_argument(
        "--original-format",
        choices=("pt", "safetensors"),
        default="pt",
        help="for --to original: model.pt, which all its tools read (default), or its safetensors",
    )


def run(options: argparse.Namespace) -> int:
    """Convert, prove the result by logits, and say what could not come along."""
    import torch

    from olmo_hf.model.conversion.convert import open_checkpoint, prepare

    if options.target.exists():
        raise ConversionError(f"{options.target} exists; nothing is overwritten: choose another name or remove it")
    source = open_checkpoint(options.source)
    to = options.to
    if to is None:
        to = "original" if source.kind == "Hugging Face" else "huggingface"
    print(f"{options.source}: {source.kind}, {len(source.weights)} tensors -> {to}")
    wanted = prepare(
        source,
        trim=options.vocab_padding == "trim",
        dtype=None if options.dtype is None else getattr(torch, options.dtype),
        keep_optimizer=not options.no_optimizer,
    )
    partial = options.target.with_name(f".{options.target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        notices = source.notices + _write(options, to, wanted, partial)
        if not options.no_verify:
            _verify(wanted, partial)
            if options.dtype is not None:
                _tell_rounding(source, partial, options.dtype)
        os.replace(partial, options.target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    for notice in notices:
        print(f"note: {notice}")
    print(f"written: {options.target}")
    return 0


def _write(options: argparse.Namespace, to: str, wanted: "Checkpoint", directory: Path) -> list[str]:
    from olmo_hf.model.conversion.convert import carry_tokenizer, write_huggingface, write_to_original

    if to == "original":
        notices = write_to_original(wanted, directory, file_format=options.original_format)
        notices += carry_tokenizer(options.source, options.tokenizer, wanted.config, directory)
        if (directory / "tokenizer.json").is_file():
            notices.append(
                "the original finds its tokenizer by tokenizer.identifier of its config.yaml: name this tokenizer.json"
            )
        return notices
    write_huggingface(wanted, directory)
    notices = carry_tokenizer(options.source, options.tokenizer, wanted.config, directory)
    if wanted.optimizer:
        notices += _make_resumable(options.source, wanted, directory)
    return notices


def _make_resumable(source: Path, wanted: "Checkpoint", directory: Path) -> list[str]:
    """Add what a run needs to go on from here: counters, data position, manifest."""
    from importlib.metadata import version

    from transformers import TrainerState
    from transformers.trainer import TRAINER_STATE_NAME

    from olmo_hf.data.order import DataPosition
    from olmo_hf.training import commit
    from olmo_hf.training.settling import describe_files
    from olmo_hf.training.state import RUN_STATE, RunState, load_run_state, save_run_state

    if (source / RUN_STATE).is_file():
        state = load_run_state(source)
        for path in [source / TRAINER_STATE_NAME, source / "optimizer.json", *source.glob("rng_state_*.json")]:
            if path.is_file():
                shutil.copyfile(path, directory / path.name)
    else:
        counters = wanted.counters
        state = RunState(
            step=counters.get("global_step", 0),
            tokens=counters.get("global_train_tokens_seen", 0),
            position=DataPosition(
                epoch=counters.get("epoch", 0), instances=counters.get("global_train_examples_seen_this_epoch", 0)
            ),
        )
        # The Trainer compares train_batch_size with the new launch's (a warning); it must be a number.
        trainer_state = TrainerState(global_step=state.step, num_input_tokens_seen=state.tokens, train_batch_size=1)
        trainer_state.save_to_json(str(directory / TRAINER_STATE_NAME))
    save_run_state(state, directory)
    names = [str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()]
    manifest = commit.Manifest(
        kind="unsharded",
        step=state.step,
        tokens=state.tokens,
        world_size=state.world_size,
        files=describe_files(directory, sorted(names)),
        versions={package: version(package) for package in ("torch", "transformers", "accelerate")},
    )
    commit.write_manifest(directory, manifest)
    return [f"a run can go on from here at step {state.step}: set training.resume to this directory"]


def _verify(wanted: "Checkpoint", directory: Path) -> None:
    """Compare the logits of what was wanted and of what lies on disk now."""
    from olmo_hf.model.conversion.convert import largest_logit_difference, open_checkpoint

    difference = largest_logit_difference(wanted, open_checkpoint(directory))
    print(f"largest |logit difference| on random ids: {difference:.3g}")
    if difference != 0.0:
        raise ConversionError(
            f"the logits of source and target differ by {difference:.3g}; the same weights give the same logits, so "
            "the target is wrong and was not kept"
        )


def _tell_rounding(source: "Checkpoint", directory: Path, dtype: str) -> None:
    """Say how far the type asked for moves the logits of the source."""
    from olmo_hf.model.conversion.convert import largest_logit_difference, open_checkpoint

    difference = largest_logit_difference(source, open_checkpoint(directory))
    print(f"--dtype {dtype} moves the logits of the source by up to {difference:.3g}")
