"""From a `data` section to what a trainer or an evaluator reads."""

import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, cast

from olmo_hf.data.args import DataArgs, data_problems
from olmo_hf.data.checks import ResolvedFiles, check_files, copied_files, list_files, mix_of, resolve_files
from olmo_hf.data.collator import DataCollator
from olmo_hf.data.memmap import MemMapDataset
from olmo_hf.data.mixing import MixedDataset, describe_mix
from olmo_hf.data.order import DataPosition, OrderedDataset
from olmo_hf.data.order_index import default_index_dir
from olmo_hf.data.remote import is_remote
from olmo_hf.data.token_checks import TokenLimits
from olmo_hf.data.token_files import TokenFile
from olmo_hf.distributed import broadcast_object, is_main_process, patient_group, run_on_all
from olmo_hf.errors import DataError

logger = logging.getLogger(__name__)

Value = TypeVar("Value")


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
    order_seed = seed if args.seed is None else args.seed
    dataset = _checked_dataset(args, limits, global_train_batch_size, pad_token_id=pad_token_id, seed=order_seed)
    ordered = _in_order(dataset, args, seed=order_seed, global_train_batch_size=global_train_batch_size, start=start)
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
    dataset = _open_dataset(
        args, resolve_files(args), {}, eos_token_id=eos_token_id, pad_token_id=pad_token_id, seed=order_seed
    )
    return _in_order(dataset, args, seed=order_seed, global_train_batch_size=global_train_batch_size, start=start)


def _in_order(
    dataset: MemMapDataset | MixedDataset,
    args: DataArgs,
    *,
    seed: int,
    global_train_batch_size: int,
    start: DataPosition,
) -> OrderedDataset:
    return OrderedDataset(
        dataset,
        seed=seed,
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
    limits = TokenLimits(vocab_size=vocab_size, eos_token_id=eos_token_id)
    seed = 0 if args.seed is None else args.seed
    dataset = _checked_dataset(args, limits, None, pad_token_id=pad_token_id, seed=seed)
    return dataset, build_collator(pad_token_id, args.document_positions)


def build_collator(pad_token_id: int | None, document_positions: Literal["keep", "reset"]) -> DataCollator:
    """Instances are equally long, so the id of the padding is never seen; 0 stands for a tokenizer without one."""
    return DataCollator(0 if pad_token_id is None else pad_token_id, restart_positions=document_positions == "reset")


def _checked_dataset(
    args: DataArgs, limits: TokenLimits, global_batch_size: int | None, *, pad_token_id: int | None, seed: int
) -> MemMapDataset | MixedDataset:
    """The data of a section. Rank 0 lists and checks the files and tells the others; what fails, fails everywhere.

    Every machine opens its local files itself, since another machine's may be missing; remote files are only opened by
    rank 0: thousands of ranks asking for thousands of files would be an attack.

    Raises:
        DataError: The data cannot be used; on every rank, with the same words.
    """

    def refuse(messages: list[str]) -> DataError:
        return DataError(describe_problems(messages))

    with patient_group(needed=args.check == "full" or args.cache_dir is not None) as group:

        def from_main(action: Callable[[], Value]) -> Value:
            """What rank 0 finds out, on all ranks; no problem on rank 0 is left to the others to wait for."""
            return broadcast_object(
                run_on_all(action if is_main_process() else lambda: cast(Value, None), refuse, group), group
            )

        problems, listed = from_main(lambda: _listed(args))
        if listed is None:
            raise refuse(problems + _masking_problems(args, limits))
        files = run_on_all(lambda: copied_files(listed, args.cache_dir), refuse, group)
        problems, opened = from_main(
            lambda: check_files(args, files, limits=limits, global_batch_size=global_batch_size)
        )
        problems += _masking_problems(args, limits)
        if problems:
            raise refuse(problems)
        known = {path: file for path, file in opened.items() if is_remote(path)}
        return run_on_all(
            lambda: _open_dataset(
                args, files, known, eos_token_id=limits.eos_token_id, pad_token_id=pad_token_id, seed=seed
            ),
            refuse,
            group,
        )


def _listed(args: DataArgs) -> tuple[list[str], ResolvedFiles | None]:
    """What contradicts itself in a section, or the files that it names."""
    problems = list(data_problems(args, "data"))
    try:
        return problems, None if problems else list_files(args)
    except DataError as error:
        return [str(error)], None


def _masking_problems(args: DataArgs, limits: TokenLimits) -> list[str]:
    if not args.document_masking or limits.eos_token_id is not None:
        return []
    return [
        "data.document_masking: needs the end-of-text id, and neither the tokenizer nor the model names one; set "
        "model.tokenizer or model.config.eos_token_id"
    ]


def _open_dataset(
    args: DataArgs,
    files: ResolvedFiles,
    known: Mapping[str, TokenFile],
    *,
    eos_token_id: int | None,
    pad_token_id: int | None,
    seed: int,
) -> MemMapDataset | MixedDataset:
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
        known=known,
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
