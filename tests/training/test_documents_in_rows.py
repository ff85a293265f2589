"""Documents that share a row, through the trainer: one step is that of the documents apart."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from olmo_hf.data.build import build_collator
from tests.training.small import PLAIN_DESCENT, VOCAB, tiny, trainer_of

LENGTHS = torch.tensor([[10, 1, 5, 0], [3, 2, 7, 4], [16, 0, 0, 0], [8, 8, 0, 0]], dtype=torch.int32)
ROW = 16


def weights_after_documents_apart(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Every document by itself in the model; the last token of one is still trained on the first of the next."""
    model = tiny().train()
    total = torch.zeros(())
    for row, lengths in zip(ids, LENGTHS.tolist(), strict=True):
        parts = row.split([length for length in lengths if length])
        logits = torch.cat([model(input_ids=part[None], use_cache=False).logits[0] for part in parts])
        total = total + F.cross_entropy(logits[:-1], row[1:], reduction="sum")
    (total / (len(ids) * (ROW - 1))).backward()
    return {name: (p - p.grad).detach() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("implementation", "positions"), [("plain", "keep"), ("chunked", "keep"), ("chunked", "reset")]
)
def test_a_step_is_that_of_the_documents_apart(tmp_path: Path, implementation: str, positions: Any) -> None:
    ids = torch.randint(2, VOCAB, (4, ROW), generator=torch.Generator().manual_seed(3))
    found = {}
    for masked in (True, False):
        rows = [
            {"input_ids": row, **({"doc_lens": lengths[lengths > 0]} if masked else {})}
            for row, lengths in zip(ids, LENGTHS, strict=True)
        ]
        model = tiny()
        settings = {"loss_implementation": implementation, "loss_chunk_tokens": 7, **PLAIN_DESCENT}
        batches = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
        trainer = trainer_of(tmp_path / str(masked), model, rows, **settings, **batches)
        trainer.data_collator = build_collator(1, positions)
        trainer.train()
        found[masked] = dict(model.named_parameters())
    expected = weights_after_documents_apart(ids)
    assert set(expected) == set(found[True])
    # float32 sums of gradients below 1 in another order: 1e-7 apart; without the lengths 0.17.
    apart = max((found[True][name] - expected[name]).abs().max().item() for name in expected)
    together = max((found[False][name] - expected[name]).abs().max().item() for name in expected)
    assert apart < 1e-6
    assert together > 0.1
