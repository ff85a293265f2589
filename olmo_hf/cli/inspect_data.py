"""`olmo-hf inspect-data`: what a run reads, step by step, as ids and as text."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from olmo_hf.errors import DataError

if TYPE_CHECKING:
    import numpy as np

    from olmo_hf.args import RunArgs
    from olmo_hf.data.order import OrderedDataset

HELP = "show which instances a step reads and their text, from a config or a run; statistics; differences"

SHOWN_CHARACTERS = 300
"""Text shown of an instance unless all is asked for."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the verb."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="a run's YAML, or the directory of a run")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.FIELD=VALUE", help="override a setting; may be repeated"
    )
    parser.add_argument("--step", type=int, metavar="N", help="step to show, from 1")
    parser.add_argument("--rank", type=int, metavar="R", help="only what this rank reads of it")
    parser.add_argument(
        "--world-size", type=int, metavar="W", help="number of ranks (default: of the recorded run, or 1)"
    )
    parser.add_argument("--full-text", action="store_true", help="show all of the text")
    parser.add_argument("--ids-only", action="store_true", help="show no text")
    parser.add_argument(
        "--recorded", action="store_true", help="of a run: show what was recorded; without --step, compare every step"
    )
    parser.add_argument(
        "--compare", type=Path, metavar="OTHER", help="compare with the order of another config or run"
    )
    parser.add_argument("--steps", type=int, default=100, metavar="N", help="steps compared (default: %(default)s)")
    parser.add_argument("--statistics", action="store_true", help="documents, lengths, filter decisions, sources")
    parser.add_argument(
        "--max-instances", type=int, default=10_000, metavar="N", help="instances looked at for statistics"
    )
    parser.add_argument("--picture", type=Path, metavar="PNG", help="draw the statistics")


def run(namespace: argparse.Namespace) -> int:
    """Answers what was asked. Returns 1 when a record or an order disagrees."""
    if namespace.step is None and not (namespace.recorded or namespace.compare or namespace.statistics):
        raise DataError("nothing is asked: give --step, --recorded, --compare or --statistics")
    world_size = namespace.world_size
    if world_size is None and namespace.config.is_dir():
        world_size = len(_record(namespace.config)) or None
    settings, data = open_run_data(namespace.config, namespace.set, world_size)
    if namespace.compare is not None:
        other = open_run_data(namespace.compare, namespace.set, namespace.world_size)[1]
        return _compare(data, other, namespace.steps)
    if namespace.statistics:
        return _statistics(settings, data, namespace)
    if namespace.step is None:
        return _agreement(namespace.config, data)
    return _show_step(settings, data, namespace)


def open_run_data(config: Path, overrides: list[str], world_size: int | None) -> tuple["RunArgs", "OrderedDataset"]:
    """The settings of a run and its data in their order, from its beginning.

    `world_size` matters only where the config leaves the global batch size to the number of ranks.
    """
    from olmo_hf.config_file import load_run
    from olmo_hf.data.build import open_train_data
    from olmo_hf.data.order import DataPosition
    from olmo_hf.training.batch_plan import global_batch_size

    path = config / "config.yaml" if config.is_dir() else config
    settings = load_run(path, [f"--{override}" for override in overrides])
    data = open_train_data(
        settings.data,
        seed=settings.training.seed,
        eos_token_id=_eos_token_id(settings),
        pad_token_id=None,
        global_train_batch_size=global_batch_size(settings.training, 1 if world_size is None else world_size),
        start=DataPosition(),
    )
    return settings, data


def _first_file(settings: "RunArgs") -> str:
    """The first token file of a run, where it lies rather than where it was copied to."""
    from olmo_hf.data.checks import list_files

    return list_files(settings.data).paths[0]


def _eos_token_id(settings: "RunArgs") -> int | None:
    from olmo_hf.data.manifest_lookup import manifest_beside

    manifest = manifest_beside(_first_file(settings))
    if manifest is not None:
        return manifest.eos_token_id
    if settings.model.tokenizer is None:
        configured = settings.model.config.get("eos_token_id")
        return configured if isinstance(configured, int) else None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(settings.model.tokenizer).eos_token_id


def _decoder(settings: "RunArgs") -> Callable[["np.ndarray"], str]:
    """Turns tokens into text, by the run's tokenizer or that of its data; without one, into numbers."""
    from olmo_hf.data.manifest_lookup import tokenizer_beside
    from olmo_hf.data.remote import is_remote, read_if_there

    folder = settings.model.tokenizer
    if folder is None:
        folder = tokenizer_beside(_first_file(settings))
    if folder is not None and is_remote(folder):
        from tokenizers import Tokenizer

        content = read_if_there(f"{folder}/tokenizer.json")
        if content is not None:
            raw = Tokenizer.from_str(content.decode("utf-8"))
            return lambda tokens: str(raw.decode(tokens.tolist(), skip_special_tokens=False))
        folder = None
    if folder is None:
        return lambda tokens: " ".join(map(str, tokens.tolist()))
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return lambda tokens: str(tokenizer.decode(tokens.tolist(), clean_up_tokenization_spaces=False))


def _show_step(settings: "RunArgs", data: "OrderedDataset", namespace: argparse.Namespace) -> int:
    import numpy as np

    from olmo_hf.callbacks.data_indices import read_returns
    from olmo_hf.data.inspection import data_of_step, ids_of_rank, inspect_instances, ranks_of_step

    record = _record(namespace.config) if namespace.config.is_dir() else []
    world_size = namespace.world_size
    if world_size is None:
        world_size = (ranks_of_step(data, record, namespace.step) or len(record)) if record else 1
    _require_step_of_run(settings, data, record, namespace.step)
    returns = read_returns(namespace.config) if namespace.config.is_dir() else []
    ids = data_of_step(data, returns, namespace.step)
    ranks = range(world_size) if namespace.rank is None else [namespace.rank]
    parts = {rank: ids_of_rank(ids, rank, world_size) for rank in ranks}
    disagrees = False
    if record:
        found = {rank: record[rank].get(namespace.step) for rank in ranks if rank < len(record)}
        disagrees = _tell_record(namespace, found, parts)
        if namespace.recorded:
            parts = {rank: np.array(ids, np.int64) for rank, ids in found.items() if ids is not None}
    elif namespace.recorded:
        raise DataError(f"{namespace.config}: holds no data-indices; name the directory of a run that recorded them")
    decode = None if namespace.ids_only else _decoder(settings)
    for rank, part in parts.items():
        print(f"step {namespace.step}, rank {rank} of {world_size}: {', '.join(map(str, part.tolist()))}")
        if decode is None:
            continue
        for instance in inspect_instances(data, part):
            where = f"{instance.path}, token {instance.offset_tokens:,}"
            source = "" if instance.source is None else f", source {instance.source}"
            masked = "" if instance.is_kept else ", masked as repetitive"
            print(f"\n--- instance {instance.instance_id} ({where}{source}{masked})")
            text = decode(instance.tokens)
            cut = len(text) > SHOWN_CHARACTERS and not namespace.full_text
            print(text[:SHOWN_CHARACTERS] + f" ... ({len(text):,} characters)" if cut else text)
    return 1 if disagrees else 0


def _require_step_of_run(
    settings: "RunArgs", data: "OrderedDataset", record: list[dict[int, list[int]]], step: int
) -> None:
    from olmo_hf.training.durations import duration_in_steps

    last = duration_in_steps(
        settings.training.max_duration,
        tokens_per_step=data.global_batch_size * settings.data.sequence_length,
        steps_per_epoch=data.steps_per_epoch,
    )
    if step > last and not any(step in part for part in record):
        raise DataError(
            f"--step: found {step:,}, but training.max_duration ({settings.training.max_duration}) ends the run at "
            f"step {last:,}; to see what a longer one reads, add --set training.max_duration={step}"
        )


def _tell_record(
    namespace: argparse.Namespace, found: dict[int, list[int] | None], expected: dict[int, "np.ndarray"]
) -> bool:
    """Says how what was recorded of a step compares with its order. Returns whether any of it differs."""
    from olmo_hf.callbacks.data_indices import data_indices_path, times_read

    disagrees = any(ids is not None and ids != expected[rank].tolist() for rank, ids in found.items())
    missing = [rank for rank, ids in found.items() if ids is None]
    for rank in missing:
        print(f"step {namespace.step} of rank {rank} was not recorded")
    if not missing:
        print(f"what was recorded {'DIFFERS FROM' if disagrees else 'agrees with'} the order")
    times = times_read(data_indices_path(namespace.config, 0)).get(namespace.step, 0)
    if times > 1:
        print(f"the step was read {times} times, since the run was restarted before it; the last time is shown")
    return disagrees


def _record(run_dir: Path) -> list[dict[int, list[int]]]:
    """What each rank recorded."""
    from olmo_hf.callbacks.data_indices import data_indices_path, read_data_indices

    found: list[dict[int, list[int]]] = []
    while (path := data_indices_path(run_dir, len(found))).is_file():
        found.append(read_data_indices(path))
    return found


def _agreement(run_dir: Path, data: "OrderedDataset") -> int:
    from olmo_hf.callbacks.data_indices import data_indices_path, read_returns, times_read
    from olmo_hf.data.inspection import compare_with_record, describe_steps

    record = _record(run_dir)
    if not record:
        raise DataError(f"{run_dir}: holds no data-indices; name the directory of a run that recorded them")
    agreement = compare_with_record(data, record, read_returns(run_dir))
    ranks = f"{len(record)} ranks" if len(record) > 1 else "1 rank"
    print(f"{len(agreement.steps):,} steps of {ranks} were recorded")
    again = {step: times for step, times in times_read(data_indices_path(run_dir, 0)).items() if times > 1}
    if again:
        print(f"{len(again):,} of them were repeated after a restart: {describe_steps(sorted(again))}")
    if agreement.incomplete:
        print(f"{len(agreement.incomplete):,} were not recorded by every rank: {describe_steps(agreement.incomplete)}")
    if not agreement.disagreeing:
        print("all agree with the order")
        return 0
    print(f"{len(agreement.disagreeing):,} differ from the order: {describe_steps(agreement.disagreeing)}")
    return 1


def _compare(first: "OrderedDataset", second: "OrderedDataset", steps: int) -> int:
    from olmo_hf.data.inspection import compare_orders

    difference = compare_orders(first, second, steps)
    if difference.first_reordered_step is None:
        print(f"the first {steps:,} steps read the same instances in the same order")
        return 0
    if difference.first_different_step is None:
        print(f"all {steps:,} steps read the same instances; within step {difference.first_reordered_step} the order")
        print("differs")
    else:
        print(f"the first step that reads something else is step {difference.first_different_step}")
    print(
        f"in {steps:,} steps {difference.shared:,} instances are read by both, {difference.only_first:,} only by the "
        f"first, {difference.only_second:,} only by the second"
    )
    return 1


def _statistics(settings: "RunArgs", data: "OrderedDataset", namespace: argparse.Namespace) -> int:
    import numpy as np

    from olmo_hf.data.args import InstanceFilterArgs
    from olmo_hf.data.inspection import dataset_statistics

    window = settings.data.instance_filter
    statistics = dataset_statistics(
        data.dataset,
        eos_token_id=_eos_token_id(settings),
        instance_filter=InstanceFilterArgs() if window is None else window,
        max_instances=namespace.max_instances,
    )
    print(f"{statistics.num_instances:,} instances of {data.dataset.sequence_length:,} tokens")
    print(f"{statistics.num_inspected:,} looked at, evenly spread:")
    print(
        f"  {statistics.num_masked:,} would be masked as repetitive"
        if window is None
        else f"  {statistics.num_masked:,} are masked as repetitive"
    )
    print(f"  {100 * statistics.learned_tokens / statistics.tokens:.2f} % of the tokens are learned")
    if statistics.document_lengths.size:
        quantiles = np.quantile(statistics.document_lengths, [0.1, 0.5, 0.9]).astype(int).tolist()
        print(f"  {statistics.num_whole_documents:,} documents end in them; their pieces have")
        print(f"  {quantiles[0]:,} (10 %), {quantiles[1]:,} (half), {quantiles[2]:,} (90 %) tokens or fewer")
    total = sum(statistics.instances_by_source.values())
    for name, count in statistics.instances_by_source.items():
        print(f"  {100 * count / total:6.2f} %  {count:>12,}  {name}")
    if namespace.picture is not None:
        from olmo_hf.report.data_picture import draw_statistics

        draw_statistics(statistics, namespace.picture)
        print(namespace.picture)
    return 0
