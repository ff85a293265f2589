"""The collator and the labels against the original's."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from olmo_hf.data.collator import DataCollator
from olmo_hf.data.instance_batch import InstanceBatch

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = json.loads((GOLDEN / "05_collator" / "collator.json").read_text())
LABELS = json.loads((GOLDEN / "06_get_labels" / "get_labels.json").read_text())
DTYPES = {f"torch.{name}": getattr(torch, name) for name in ("int64", "int32", "float32", "bool")}


def tensor(value: Any) -> Any:
    """A recorded value: a tensor where it was one."""
    if isinstance(value, dict) and "dtype" in value:
        values = [float(v) if isinstance(v, str) else v for v in value["values"]]
        return torch.tensor(values, dtype=DTYPES[value["dtype"]]).reshape(value["shape"])
    return value


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['name']}-{c['pad_direction']}")
def test_batches_equal_the_originals(case: dict) -> None:
    items = [
        torch.tensor(item["bare"]) if "bare" in item else {key: tensor(value) for key, value in item.items()}
        for item in case["items"]
    ]
    batch = DataCollator(case["pad_token_id"], case["pad_direction"])(items)
    labels = batch.pop("labels")
    assert sorted(batch) == sorted(case["batch"])
    for key, recorded in case["batch"].items():
        expected = tensor(recorded)
        if isinstance(expected, torch.Tensor):
            assert batch[key].dtype == expected.dtype
            assert torch.equal(batch[key], expected)
        else:
            assert batch[key] == expected
    assert labels.shape == batch["input_ids"].shape


@pytest.mark.parametrize("case", LABELS["cases"], ids=lambda c: "+".join(c["uses"]) or "none")
def test_labels_equal_the_originals(case: dict) -> None:
    kinds = {"label_mask": torch.bool, "attention_mask": torch.float, "instance_mask": torch.bool}
    items = []
    for row, input_ids in enumerate(LABELS["input_ids"]):
        item: dict[str, Any] = {"input_ids": torch.tensor(input_ids)}
        for use in case["uses"]:
            # "attention_mask int64" and "instance_mask all False" vary the recorded masks.
            key, _, variant = use.partition(" ")
            value = torch.tensor(LABELS[key][row], dtype=torch.int64 if variant == "int64" else kinds[key])
            item[key] = torch.zeros_like(value) if variant == "all False" else value
        items.append(item)
    batch = DataCollator(1)(items)
    assert batch["labels"][:, 1:].tolist() == case["labels"]
    assert batch["input_ids"].tolist() == LABELS["input_ids"]


@pytest.mark.parametrize("direction", ["left", "right"])
def test_padding_has_no_labels(direction: Any) -> None:
    # The padding id also occurs as a real token: only padding loses its label.
    batch = DataCollator(1, direction)([{"input_ids": [1, 5, 1]}, {"input_ids": [7]}])
    assert batch["labels"][0].tolist() == [1, 5, 1]
    assert batch["labels"][1].tolist() == ([-100, -100, 7] if direction == "left" else [7, -100, -100])


@pytest.mark.parametrize("key", ["", "label_mask", "instance_mask", "attention_mask", "doc_lens", "all"])
def test_instances_read_together_give_the_batch_of_their_items(key: str) -> None:
    tokens = torch.arange(12, dtype=torch.int32).reshape(3, 4).to(torch.uint16)
    columns: dict[str, Any] = {
        "label_mask": torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1]], dtype=torch.bool),
        "instance_mask": [True, True, False],
        "attention_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [0, 1, 1, 1]]),
        "doc_lens": [torch.tensor(lengths, dtype=torch.int32) for lengths in ([4], [1, 3], [2, 1, 1])],
        "index": [7, 5, 9],
        "source": [0, 1, 0],
        "metadata": [{"path": "a"}, {"path": "b"}, {"path": "c"}],
    }
    if key != "all":
        columns = {k: v for k, v in columns.items() if k in (key, "index")}
    together = InstanceBatch(tokens, columns)
    collator = DataCollator(0, restart_positions=True)
    batch, expected = collator(together), collator(list(together))
    assert batch.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert batch[name].dtype == value.dtype
            assert torch.equal(batch[name], value)
        else:
            assert batch[name] == value
    # Labels are memory of their own: whoever changes them leaves the input as it is.
    batch["labels"].fill_(-100)
    assert torch.equal(batch["input_ids"], tokens.long())


def test_a_sequence_of_items() -> None:
    batch = InstanceBatch(torch.arange(12, dtype=torch.int64).reshape(3, 4), {"index": [7, 5, 9]})
    assert [item["index"] for item in batch] == [7, 5, 9]
    assert batch[-1]["input_ids"].tolist() == [8, 9, 10, 11]
    assert [item["index"] for item in batch[1:]] == [5, 9]
    with pytest.raises(IndexError, match="item 3 of 3"):
        batch[3]


def test_masks_of_some_items_touch_only_those() -> None:
    batch = DataCollator(0)(
        [
            {"input_ids": [1, 2]},
            {"input_ids": [3, 4], "label_mask": [False, True]},
            {"input_ids": [5, 6], "instance_mask": False},
        ]
    )
    assert batch["labels"].tolist() == [[1, 2], [-100, 4], [-100, -100]]


def test_positions_begin_anew_in_every_document() -> None:
    items = [
        {"input_ids": list(range(5)), "doc_lens": torch.tensor([2, 1, 2], dtype=torch.int32)},
        {"input_ids": list(range(5)), "doc_lens": torch.tensor([5], dtype=torch.int32)},
    ]
    batch = DataCollator(0, restart_positions=True)(items)
    assert batch["position_ids"].tolist() == [[0, 1, 0, 0, 1], [0, 1, 2, 3, 4]]
    assert "position_ids" not in DataCollator(0)(items)
    assert "position_ids" not in DataCollator(0, restart_positions=True)([{"input_ids": [1, 2]}])


LENGTHS = st.lists(st.integers(1, 7), min_size=1, max_size=5)


@settings(max_examples=150, deadline=None)
@given(lengths=LENGTHS, left=st.booleans(), pad=st.integers(0, 9), data=st.data())
def test_any_rows_keep_their_tokens_and_learn_only_from_what_is_unmasked(
    lengths: list[int], left: bool, pad: int, data: st.DataObject
) -> None:
    """Every row comes back whole, and labels are the tokens that no mask covers, in their place."""
    items, expected = [], []
    for length in lengths:
        ids = torch.tensor(data.draw(st.lists(st.integers(0, 99), min_size=length, max_size=length)))
        bits = st.none() | st.lists(st.booleans(), min_size=length, max_size=length)
        label_mask, attention_mask = data.draw(bits), data.draw(bits)
        instance_mask = data.draw(st.none() | st.booleans())
        item: dict[str, Any] = {"input_ids": ids}
        learned = torch.ones(length, dtype=torch.bool)
        for name, value in (("label_mask", label_mask), ("attention_mask", attention_mask)):
            if value is not None:
                item[name] = torch.tensor(value)
                learned &= torch.tensor(value)
        if instance_mask is not None:
            item["instance_mask"] = instance_mask
            learned &= instance_mask
        items.append(item)
        expected.append(torch.where(learned, ids, -100))
    batch = DataCollator(pad, "left" if left else "right")(items)
    longest = max(lengths)
    assert batch["input_ids"].shape == batch["labels"].shape == (len(lengths), longest)
    for row, (item, labels) in enumerate(zip(items, expected, strict=True)):
        missing = longest - len(labels)
        own = slice(missing, None) if left else slice(0, len(labels))
        padding = slice(0, missing) if left else slice(len(labels), None)
        assert torch.equal(batch["input_ids"][row, own], item["input_ids"])
        assert torch.equal(batch["labels"][row, own], labels)
        assert (batch["input_ids"][row, padding] == pad).all()
        assert (batch["labels"][row, padding] == -100).all()


@settings(max_examples=100, deadline=None)
@given(rows=st.integers(1, 4), length=st.integers(1, 6), data=st.data())
def test_any_instances_read_together_are_their_items(rows: int, length: int, data: st.DataObject) -> None:
    def grid(elements: st.SearchStrategy, dtype: torch.dtype) -> torch.Tensor:
        row = st.lists(elements, min_size=length, max_size=length)
        return torch.tensor(data.draw(st.lists(row, min_size=rows, max_size=rows)), dtype=dtype)

    columns: dict[str, Any] = {"index": list(range(rows))}
    if data.draw(st.booleans()):
        columns["label_mask"] = grid(st.booleans(), torch.bool)
    if data.draw(st.booleans()):
        columns["instance_mask"] = data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows))
    if data.draw(st.booleans()):
        cuts = [data.draw(st.integers(1, length)) for _ in range(rows)]
        columns["doc_lens"] = [torch.tensor([n for n in (cut, length - cut) if n], dtype=torch.int32) for cut in cuts]
    together = InstanceBatch(grid(st.integers(0, 60_000), torch.int32), columns)
    collator = DataCollator(0, restart_positions=data.draw(st.booleans()))
    at_once, one_by_one = collator(together), collator(list(together))
    assert at_once.keys() == one_by_one.keys()
    for key, value in at_once.items():
        same = torch.equal(value, one_by_one[key]) if isinstance(value, torch.Tensor) else value == one_by_one[key]
        assert same, key
