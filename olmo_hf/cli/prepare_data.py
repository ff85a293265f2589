"""`olmo-hf prepare-data`: documents in, token files and a manifest out."""

import argparse
import os
import sys

from tqdm import tqdm

from olmo_hf.data.encode_documents import EncodedBatch
from olmo_hf.data.prepare import PrepareReport, prepare_data
from olmo_hf.data.prepare_options import PrepareOptions
from olmo_hf.data.tokenizer_files import read_tokenizer
from olmo_hf.data.verify import verify_files, verify_prepared
from olmo_hf.errors import DataError
from olmo_hf.wording import counted

HELP = "turn text, JSON lines, Parquet or a datasets data set into token files and a manifest"

SHOWN_BAD = 10
"""Bad documents shown at the end; the number of all is always said."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `prepare-data`. Defaults are those of `PrepareOptions`."""
    default = PrepareOptions(output="")
    _add_sources(parser, default)
    tokenizer = parser.add_argument_group("tokenizer")
    tokenizer.add_argument("--tokenizer", metavar="PATH", help="directory, tokenizer.json or hub name")
    tokenizer.add_argument("--train-tokenizer", type=int, metavar="VOCAB_SIZE", help="instead: train one of this size")
    tokenizer.add_argument("--eos-token", metavar="TOKEN", help="its end-of-text token, if it does not name one")
    _add_output(parser, default)


def _add_sources(parser: argparse.ArgumentParser, default: PrepareOptions) -> None:
    sources = parser.add_argument_group("sources")
    sources.add_argument(
        "sources",
        nargs="*",
        metavar="SOURCE",
        help="files or directories: plain text (one document a file), .jsonl, .jsonl.gz, .jsonl.zst, .parquet",
    )
    sources.add_argument("--dataset", metavar="NAME_OR_DIR", help="instead: a data set of `datasets`")
    sources.add_argument("--dataset-split", default=default.dataset_split, help="its split (default: %(default)s)")
    sources.add_argument("--text-column", default=default.text_column, help="field of the text (default: %(default)s)")
    sources.add_argument(
        "--messages-column",
        metavar="COLUMN",
        help="field of conversations: renders them with the tokenizer's chat template and writes label masks",
    )
    sources.add_argument(
        "--pattern", action="append", default=[], help="what to take of a directory, such as '*.py'; may be repeated"
    )
    sources.add_argument(
        "--exclude", action="append", default=[], help="name or path pattern to leave out; may be repeated"
    )
    sources.add_argument("--max-documents", type=int, metavar="N", help="only the first N documents")
    sources.add_argument(
        "--max-bad-documents",
        type=int,
        default=default.max_bad_documents,
        metavar="N",
        help="give up beyond N unreadable documents (default: %(default)s)",
    )


def _add_output(parser: argparse.ArgumentParser, default: PrepareOptions) -> None:
    output = parser.add_argument_group("output")
    output.add_argument("--output", metavar="DIR", help="gets tokenizer/, train/ and validation/")
    output.add_argument(
        "--verify",
        action="store_true",
        help="make nothing: read every token of the SOURCEs (prepared directories, or token files with --token-dtype "
        "and, for a check of the ids, --tokenizer) and say what is wrong with them",
    )
    output.add_argument(
        "--validation-fraction",
        type=float,
        default=default.validation_fraction,
        help="share of the documents, chosen by hash, kept for validation (default: %(default)s)",
    )
    output.add_argument(
        "--max-tokens-per-file",
        type=int,
        default=default.max_tokens_per_file,
        metavar="N",
        help="size of a token file (default: %(default)s)",
    )
    output.add_argument(
        "--token-dtype",
        choices=["auto", "uint16", "uint32"],
        default=default.token_dtype,
        help="type of a token on disk (default: the smallest that holds every id)",
    )
    output.add_argument(
        "--num-workers",
        type=int,
        default=default.num_workers,
        metavar="N",
        help="processes that encode; 0: the tokenizer's own threads (default: %(default)s)",
    )


def options_of(namespace: argparse.Namespace) -> PrepareOptions:
    """What the command line asks for."""
    return PrepareOptions(
        output=namespace.output,
        sources=tuple(namespace.sources),
        dataset=namespace.dataset,
        dataset_split=namespace.dataset_split,
        text_column=namespace.text_column,
        messages_column=namespace.messages_column,
        patterns=tuple(namespace.pattern),
        exclude=tuple(namespace.exclude),
        tokenizer=namespace.tokenizer,
        train_tokenizer=namespace.train_tokenizer,
        eos_token=namespace.eos_token,
        token_dtype=namespace.token_dtype,
        validation_fraction=namespace.validation_fraction,
        max_tokens_per_file=namespace.max_tokens_per_file,
        max_documents=namespace.max_documents,
        max_bad_documents=namespace.max_bad_documents,
        num_workers=namespace.num_workers,
    )


def run(namespace: argparse.Namespace) -> int:
    """Prepares or verifies the data and says what came of it."""
    if namespace.verify:
        return verify(namespace)
    if namespace.output is None:
        raise DataError("--output: is not given; name the directory that gets the token files")
    num_tokens = 0
    # On a file instead of a terminal one line in ten seconds is enough.
    interval_seconds = 0.5 if sys.stderr.isatty() else 10.0
    first = "preparing" if namespace.train_tokenizer is None else "training the tokenizer"
    with tqdm(unit="B", unit_scale=True, desc=first, file=sys.stderr, mininterval=interval_seconds) as bar:
        bar.leave = False  # a bar of nothing, where nothing was to be done

        def on_start(size_bytes: int) -> None:
            bar.leave = True
            bar.set_description("preparing", refresh=False)
            bar.total = size_bytes if size_bytes else None
            bar.reset(bar.total)

        def on_batch(batch: EncodedBatch) -> None:
            nonlocal num_tokens
            num_tokens += batch.tokens.size
            seconds = bar.format_dict["elapsed"]
            bar.set_postfix_str(f"{num_tokens / max(seconds, 1e-3):,.0f} tokens/s", refresh=False)
            bar.update(batch.size_bytes)

        report = prepare_data(options_of(namespace), on_start=on_start, on_batch=on_batch)
    describe(report, namespace.output)
    hint_at_small_tokenizer(report, namespace.train_tokenizer)
    return 0


def hint_at_small_tokenizer(report: PrepareReport, asked: int | None) -> None:
    """Says so when the text had no more pairs to merge: such a tokenizer knows the text by heart."""
    found = next(iter(report.manifests.values())).vocab_size
    if asked is not None and found < asked:
        print(
            f"note: the text gave {found:,} ids and not {asked:,}; for so little of it a smaller tokenizer is better "
            f"(--train-tokenizer 4096, another --output)",
            file=sys.stderr,
        )


def verify(namespace: argparse.Namespace) -> int:
    """Checks prepared directories or token files. Returns 1 when anything is wrong."""
    folders = [source for source in namespace.sources if os.path.isdir(source)]
    paths = [source for source in namespace.sources if not os.path.isdir(source)]
    if not namespace.sources:
        raise DataError("--verify: name prepared directories or token files")
    if paths and namespace.token_dtype == "auto":
        raise DataError(f"--token-dtype: is needed to verify {paths[0]}; say uint16 or uint32")
    facts, problems = [], []
    for found, wrong in (verify_prepared(folder) for folder in folders):
        facts += found
        problems += wrong
    if paths:
        tokenizer = None if namespace.tokenizer is None else read_tokenizer(namespace.tokenizer)
        found, wrong = verify_files(
            paths,
            dtype=namespace.token_dtype,
            vocab_size=None if tokenizer is None else tokenizer.vocab_size,
            eos_token_id=None if tokenizer is None else tokenizer.eos_token_id,
        )
        facts += found
        problems += wrong
    for fact in facts:
        documents = "" if fact.num_documents is None else f" in {fact.num_documents:,} documents"
        print(f"{fact.path}: {fact.num_tokens:,} tokens{documents}, largest id {fact.largest_token:,}")
    for problem in problems:
        print(problem, file=sys.stderr)
    print("nothing is wrong" if not problems else f"{len(problems)} problems", file=sys.stderr)
    return 1 if problems else 0


def describe(report: PrepareReport, output: str) -> None:
    """Prints what a preparation made and what it left out."""
    for split, manifest in report.manifests.items():
        print(
            f"{output}/{split}: {manifest.num_documents:,} documents, {manifest.num_tokens:,} tokens of "
            f"{manifest.token_dtype} in {counted(len(manifest.files), 'file')}"
        )
    manifest = next(iter(report.manifests.values()))
    print(f"{output}/tokenizer: {manifest.vocab_size:,} ids, end of text {manifest.eos_token_id}")
    if report.bad is None:
        print("nothing to do: this very preparation is finished already")
        return
    if report.seconds > 0:
        print(f"{report.num_tokens_now:,} tokens in {report.seconds:.1f} s")
    if report.num_empty:
        print(f"left out: {counted(report.num_empty, 'document')} without text")
    if report.num_bad:
        print(f"left out: {counted(report.num_bad, 'document')} that cannot be read", file=sys.stderr)
        for text in report.bad[:SHOWN_BAD]:
            print(f"  {text}", file=sys.stderr)
