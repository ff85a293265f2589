"""What is asked of the data without training, and the command that asks."""

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from transformers import TrainerState

from olmo_hf.callbacks.args import DataIndicesArgs
from olmo_hf.callbacks.data_indices import DataIndices, data_indices_path, read_data_indices, times_read
from olmo_hf.cli import inspect_data as cli
from olmo_hf.data.args import InstanceFilterArgs
from olmo_hf.data.inspection import (
    Agreement,
    compare_orders,
    compare_with_record,
    dataset_statistics,
    describe_steps,
    ids_of_rank,
    ids_of_step,
    inspect_instances,
    ranks_of_step,
)
from olmo_hf.data.memmap import MemMapDataset
from olmo_hf.data.order import DataPosition, OrderedDataset
from olmo_hf.data.prepare import prepare_data
from olmo_hf.data.prepare_options import PrepareOptions
from olmo_hf.data.tokenizer_files import raw_tokenizer
from olmo_hf.errors import DataError


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    texts = [f"Document number {i} is about the number {i * i}.\n" * 3 for i in range(200)]
    (folder / "s.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare_data(PrepareOptions(sources=(str(folder / "s.jsonl"),), output=str(folder / "out"), train_tokenizer=300))
    return folder / "out"


@pytest.fixture
def config(prepared: Path, tmp_path: Path) -> Path:
    (tmp_path / "c.yaml").write_text(
        f"name: x\nmodel: {{preset: olmo2_1b}}\n"
        f"training: {{max_duration: 5, global_train_batch_size: 8, seed: 11}}\n"
        f"data: {{paths: ['{prepared}/train/*.npy'], sequence_length: 16}}\n"
    )
    return tmp_path / "c.yaml"


@pytest.fixture
def order(prepared: Path) -> OrderedDataset:
    return order_of(prepared)


def order_of(prepared: Path, seed: int = 11, batch: int = 8) -> OrderedDataset:
    dataset = MemMapDataset([str(prepared / "train" / "00000.npy")], sequence_length=16, token_dtype="uint16")
    return OrderedDataset(dataset, seed=seed, shuffle=True, global_batch_size=batch, start=DataPosition())


Command = Callable[..., tuple[int, str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*words: object) -> tuple[int, str]:
        parser = argparse.ArgumentParser()
        cli.add_arguments(parser)
        return cli.run(parser.parse_args([str(word) for word in words])), capsys.readouterr().out

    return run


def test_steps_and_ranks(order: OrderedDataset) -> None:
    ids = ids_of_step(order, 3)
    assert ids.tolist() == order.instance_ids(16, 24).tolist()
    assert sorted(np.concatenate([ids_of_rank(ids, r, 4) for r in range(4)]).tolist()) == sorted(ids.tolist())
    (first, *_) = inspect_instances(order, ids)
    assert first.instance_id == ids[0]
    assert first.offset_tokens == ids[0] * 16
    with pytest.raises(DataError, match="--step: found 0"):
        ids_of_step(order, 0)
    with pytest.raises(DataError, match="--rank: found 4, expected 0 to 3"):
        ids_of_rank(ids, 4, 4)
    with pytest.raises(DataError, match="cannot be dealt to 3 ranks"):
        ids_of_rank(ids, 0, 3)


def test_orders_are_compared(prepared: Path, order: OrderedDataset) -> None:
    same = compare_orders(order, order_of(prepared), 5)
    assert (same.first_different_step, same.first_reordered_step, same.shared) == (None, None, 40)
    other = compare_orders(order, order_of(prepared, seed=12), 5)
    assert other.first_different_step == 1
    assert other.shared + other.only_first == 40
    assert other.only_first == other.only_second > 0


def test_statistics(prepared: Path, tmp_path: Path) -> None:
    tokens = np.array([5, 6, 7, 0] * 4 + [9] * 16 + list(range(1, 17)), np.uint16)
    tokens.tofile(tmp_path / "a.npy")
    dataset = MemMapDataset([str(tmp_path / "a.npy")], sequence_length=16, token_dtype="uint16")
    window = InstanceFilterArgs(repetition_max_count=8)
    found = dataset_statistics(dataset, eos_token_id=0, instance_filter=window, max_instances=100)
    assert (found.num_instances, found.num_inspected, found.num_masked) == (3, 3, 1)
    assert sorted(found.document_lengths.tolist()) == [4, 4, 4, 4, 16, 16]
    assert found.num_whole_documents == 4
    assert found.instances_by_source == {str(tmp_path / "a.npy"): 3}
    # The filter is not on in this data set, so nothing loses its labels.
    assert found.learned_tokens == found.tokens == 48
    some = dataset_statistics(dataset, eos_token_id=None, instance_filter=window, max_instances=2)
    assert (some.num_inspected, some.document_lengths.size) == (2, 0)


def test_a_step_from_the_config_alone(config: Path, prepared: Path, order: OrderedDataset, command: Command) -> None:
    status, said = command(config, "--step", 2, "--rank", 1, "--world-size", 2)
    ids = ids_of_rank(ids_of_step(order, 2), 1, 2)
    assert status == 0
    assert f"step 2, rank 1 of 2: {', '.join(map(str, ids))}" in said
    assert said.count("--- instance") == 4
    assert "the number" in said
    assert f"token {ids[0] * 16:,})" in said
    status, said = command(config, "--step", 2, "--ids-only", "--set", "training.seed=12")
    expected = ids_of_step(order_of(prepared, seed=12), 2).tolist()
    assert said == f"step 2, rank 0 of 1: {', '.join(map(str, expected))}\n"


def test_a_step_after_the_end_is_refused_in_words(config: Path, command: Command) -> None:
    with pytest.raises(
        DataError, match=r"--step: found 6, but training.max_duration \(5\) ends the run at step 5; .*=6"
    ):
        command(config, "--step", 6)
    assert command(config, "--step", 5, "--ids-only")[0] == 0
    assert command(config, "--step", 6, "--ids-only", "--set", "training.max_duration=6")[0] == 0
    in_tokens = ("--set", f"training.max_duration={5 * 8 * 16}T")
    with pytest.raises(DataError, match=r"ends the run at step 5"):
        command(config, "--step", 6, *in_tokens)
    assert command(config, "--step", 5, "--ids-only", *in_tokens)[0] == 0


def test_random_offsets_can_be_asked_too(config: Path, prepared: Path, command: Command) -> None:
    words = (config, "--step", 2, "--set", "data.order=random_offsets")
    status, said = command(*words)
    assert status == 0
    assert command(*words) == (status, said)
    tokens = np.fromfile(prepared / "train" / "00000.npy", np.uint16)
    raw = raw_tokenizer(prepared / "tokenizer")
    shown = re.findall(r"--- instance (\d+) \(\S+, token ([\d,]+)\)\n(.*?)(?=\n\n---|\n*\Z)", said, re.S)
    assert len(shown) == 8
    assert len({begin for _, begin, _ in shown}) > 4
    for instance, begin, text in shown:
        first = int(begin.replace(",", ""))
        assert first == int(instance)
        decoded = raw.decode(tokens[first : first + 16].tolist(), skip_special_tokens=False)
        assert text.strip() == decoded.strip()


def record(run_dir: Path, order: OrderedDataset, world_size: int, steps: range, shift: int = 0) -> None:
    for rank in range(world_size):
        callback = DataIndices(DataIndicesArgs(), run_dir=run_dir, rank=rank)
        for step in steps:
            ids = ids_of_rank(ids_of_step(order, step + shift), rank, world_size)
            callback.on_instances(TrainerState(global_step=step - 1), ids.tolist())
        callback.flush()


def test_what_a_run_recorded_is_compared(
    config: Path, order: OrderedDataset, command: Command, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text(config.read_text())
    with pytest.raises(DataError, match="holds no data-indices"):
        command(run_dir, "--recorded")
    record(run_dir, order, 2, range(1, 5))
    assert command(run_dir, "--recorded") == (0, "4 steps of 2 ranks were recorded\nall agree with the order\n")
    # A restart that read something else from step 4 on.
    record(run_dir, order, 2, range(4, 6), shift=1)
    status, said = command(run_dir, "--recorded")
    assert status == 1
    assert "2 differ from the order: 4-5" in said
    assert "1 of them were repeated after a restart: 4\n" in said
    status, said = command(run_dir, "--step", 4, "--recorded", "--rank", 1, "--ids-only")
    assert status == 1
    assert "what was recorded DIFFERS FROM the order" in said
    assert ", ".join(map(str, ids_of_rank(ids_of_step(order, 5), 1, 2))) in said
    assert "agrees with the order" in command(run_dir, "--step", 3, "--ids-only")[1]
    longer = ("--ids-only", "--set", "training.max_duration=9")
    assert "step 9 of rank 0 was not recorded" in command(run_dir, "--step", 9, *longer)[1]
    record(run_dir, order, 2, range(6, 8))  # with a max_duration that was since made shorter
    assert "agrees with the order" in command(run_dir, "--step", 7, "--ids-only")[1]


def test_only_steps_that_every_rank_recorded_count(order: OrderedDataset) -> None:
    ids = {step: ids_of_step(order, step) for step in (1, 2)}
    recorded = [{1: ids[1][::2].tolist(), 2: ids[2][::2].tolist()}, {1: ids[1][1::2].tolist()}]
    assert compare_with_record(order, recorded) == Agreement([1], [], [2])
    assert compare_with_record(order, recorded[::-1]).disagreeing == [1]
    # Half a share is no share.
    assert compare_with_record(order, [{1: ids[1][:3].tolist()}]) == Agreement([1], [1], [])


def test_a_restart_with_another_number_of_ranks(order: OrderedDataset, tmp_path: Path) -> None:
    record(tmp_path, order, 4, range(1, 8))
    record(tmp_path, order, 1, range(5, 7))
    record(tmp_path, order, 2, range(6, 10))
    recorded = [read_data_indices(data_indices_path(tmp_path, rank)) for rank in range(4)]
    assert compare_with_record(order, recorded) == Agreement(list(range(1, 10)), [], [])
    assert [ranks_of_step(order, recorded, step) for step in range(1, 11)] == [4] * 4 + [1] + [2] * 4 + [0]
    assert times_read(data_indices_path(tmp_path, 0)) == {1: 1, 2: 1, 3: 1, 4: 1, 5: 2, 6: 3, 7: 2, 8: 1, 9: 1}


def test_steps_as_ranges() -> None:
    assert describe_steps([3, 5, 6, 7, 9]) == "3, 5-7, 9"
    assert describe_steps(list(range(0, 100, 2)), most=2) == "0, 2, ..."
    assert describe_steps([]) == ""


def test_other_commands(config: Path, command: Command, tmp_path: Path) -> None:
    assert command(config, "--compare", config)[0] == 0
    other = tmp_path / "other.yaml"
    other.write_text(config.read_text().replace("seed: 11", "seed: 12"))
    status, said = command(config, "--compare", other, "--steps", 3)
    assert status == 1
    assert "the first step that reads something else is step 1" in said
    status, said = command(config, "--statistics", "--picture", tmp_path / "s.png")
    assert status == 0
    assert "documents end in them" in said
    assert "100.00 %" in said
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(DataError, match="nothing is asked"):
        command(config)
