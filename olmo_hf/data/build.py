"""From a `data` section to what a trainer or an evaluator reads."""

import logging
from typing import Any, Literal

from olmo_hf.data.args import DataArgs, data_problems
from olmo_hf.data.checks import check_data, mix_of, resolve_files
from olmo_hf.data.collator import DataCollator
from olmo_hf.data.memmap import MemMapDataset
from olmo_hf.data.mixing import MixedDataset, describe_mix
from olmo_hf.data.order import DataPosition, OrderedDataset
from olmo_hf.data.order_index import default_index_dir
from olmo_hf.data.token_checks import TokenLimits
from olmo_hf.errors import DataError

logger = logging.getLogger(__name__)


def build_train_data(
    args: DataArgs,
    *,
    seed: int,
    eos_token_id: int | None,
    pad_token_id: int | None,
    vocab_size: int | None,
    global_train_batch_size: int,
    start: DataPosition,
    tokenizer_size: int | None = None,
) -> tuple[OrderedDataset, DataCollator]:
    """The training data in the order of the run, checked, and the collator for them.

    Args:
        args: The `data` section.
        seed: Seed of the run; `args.seed` goes before it.
        eos_token_id: End-of-text id; needed by `document_masking`.
        pad_token_id: Padding id. Instances have one length, so nothing is padded; None will do.
        vocab_size: Rows of the model's embedding, to refuse ids it has no row for. None: not checked.
        global_train_batch_size: Instances of an optimizer step over all ranks.
        start: Where the run begins or continues.
        tokenizer_size: Ids of the tokenizer, to refuse those that only the padded embedding has. None: not checked.

    Raises:
        DataError: The data cannot be used; the message holds every problem found.
    """
    limits = TokenLimits(vocab_size=vocab_size, tokenizer_size=tokenizer_size, eos_token_id=eos_token_id)
    _refuse_problems(args, limits, global_train_batch_size)
    ordered = open_train_data(
        args,
        seed=seed,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
        global_train_batch_size=global_train_batch_size,
        start=start,
    )
    if isinstance(ordered.dataset, MixedDataset):
        logger.info("%s", describe_mix(ordered.dataset.mix, args.sequence_length))
    return ordered, build_collator(pad_token_id, args.document_positions)


def open_train_data(
    args: DataArgs,
    *,
    seed: int,
    eos_token_id: int | None,
    pad_token_id: int | None,
    global_train_batch_size: int,
    start: DataPosition,
) -> OrderedDataset:
    """Identical to `build_train_data` except that no token is looked at: for whoever only asks about the order."""
    order_seed = seed if args.seed is None else args.seed
    dataset = _open_dataset(args, eos_token_id=eos_token_id, pad_token_id=pad_token_id, seed=order_seed)
    return OrderedDataset(
        dataset,
        seed=order_seed,
        shuffle=args.shuffle,
        global_batch_size=global_train_batch_size,
        start=start,
        order=args.order,
        index_dir=default_index_dir(len(dataset)) if args.index_dir is None else args.index_dir,
    )


def build_eval_data(
    args: DataArgs, *, eos_token_id: int | None, pad_token_id: int | None, vocab_size: int | None
) -> tuple[MemMapDataset | MixedDataset, DataCollator]:
    """The data of an evaluator, checked, in file order, and the collator for them. See `build_train_data`.

    Raises:
        DataError: The data cannot be used; the message holds every problem found.
    """
    _refuse_problems(args, TokenLimits(vocab_size=vocab_size, eos_token_id=eos_token_id), None)
    seed = 0 if args.seed is None else args.seed
    dataset = _open_dataset(args, eos_token_id=eos_token_id, pad_token_id=pad_token_id, seed=seed)
    return dataset, build_collator(pad_token_id, args.document_positions)


def build_collator(pad_token_id: int | None, document_positions: Literal["keep", "reset"]) -> DataCollator:
    """Instances are equally long, so the id of the padding is never seen; 0 stands for a tokenizer without one."""
    return DataCollator(0 if pad_token_id is None else pad_token_id, restart_positions=document_positions == "reset")


def _refuse_problems(args: DataArgs, limits: TokenLimits, global_batch_size: int | None) -> None:
    problems = list(data_problems(args, "data"))
    if not problems:
        problems = check_data(args, limits=limits, global_batch_size=global_batch_size)
    if args.document_masking and limits.eos_token_id is None:
        problems.append(
            "data.document_masking: needs the end-of-text id, and neither the tokenizer nor the model names one; set "
            "model.tokenizer or model.config.eos_token_id"
        )
    if problems:
        raise DataError(describe_problems(problems))


def _open_dataset(
    args: DataArgs, *, eos_token_id: int | None, pad_token_id: int | None, seed: int
) -> MemMapDataset | MixedDataset:
    files = resolve_files(args)
    dataset = MemMapDataset(
        files.paths,
        sequence_length=args.sequence_length,
        token_dtype=files.token_dtype,
        label_mask_paths=files.label_mask_paths,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
        instance_filter=args.instance_filter,
        generate_doc_lens=args.document_masking,
        instance_stride_tokens=1 if args.order == "random_offsets" else None,
    )
    if not files.source_sizes:
        return dataset
    mix = mix_of(args, files, [last - first for first, last in dataset.file_offsets])
    return MixedDataset(dataset, mix, seed=seed)


def data_loading(args: DataArgs) -> dict[str, Any]:
    """What a `DataLoader` is told, under the names of `TrainingArguments`."""
    return {
        "dataloader_num_workers": args.num_workers,
        "dataloader_prefetch_factor": args.prefetch_factor if args.num_workers else None,
        "dataloader_pin_memory": args.pin_memory,
    }


def describe_problems(problems: list[str], *, most: int = 20) -> str:
    """All problems as one message; of a great many only the first."""
    head = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    shown = [f"  - {problem}" for problem in problems[:most]]
    if len(problems) > most:
        shown.append(f"  ... and {len(problems) - most} more")
    return "\n".join([f"{head} with the data:", *shown])
