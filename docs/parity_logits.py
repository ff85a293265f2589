"""Writes the table of logits in docs/parity.md: every architecture of the original against its own recorded numbers.

python docs/parity_logits.py
"""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Olmo2ForCausalLM, OlmoForCausalLM
from transformers.utils import logging

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.parity.original import VARIANTS, load_variant, queries_with_keys  # noqa: E402

PAGE = ROOT / "docs" / "parity.md"
START, END = "<!-- logits: written by docs/parity_logits.py -->", "<!-- end of logits -->"
STOCK_CLASSES: dict[str, Any] = {"olmo2": Olmo2ForCausalLM, "olmo": OlmoForCausalLM}


@dataclass(frozen=True)
class Row:
    """Largest |difference of logits| of one architecture with the same weights, fp32, sdpa, CPU."""

    architecture: str
    saved_as: str
    """`model_type` in config.json."""
    from_original: float
    from_stock: float | None
    """None: stock transformers lacks the architecture."""


@torch.no_grad()
def measure(name: str) -> Row:
    """Run one architecture here, and as stock transformers loads it from what was saved here."""
    variant = load_variant(name)
    inputs = {"input_ids": variant.input_ids, "attention_mask": variant.attention_mask}
    logits, where = variant.model(**inputs).logits, queries_with_keys(variant)
    stock, from_stock = variant.model.config.stock_model_type, None
    if stock is not None:
        with tempfile.TemporaryDirectory() as directory:
            variant.model.save_pretrained(directory)
            twin = STOCK_CLASSES[stock].from_pretrained(directory).eval()
        from_stock = (logits - twin(**inputs).logits)[where].abs().max().item()
    return Row(
        architecture=name,
        saved_as=variant.model.config.to_dict()["model_type"],
        from_original=(logits - variant.tensors["logits"])[where].abs().max().item(),
        from_stock=from_stock,
    )


def table(rows: list[Row]) -> str:
    """Markdown."""
    lines = ["| architecture | saved as | from the original | from stock transformers |", "|---|---|---|---|"]
    for row in rows:
        stock = "not there" if row.from_stock is None else f"{row.from_stock:.1g}"
        lines.append(f"| {row.architecture} | `{row.saved_as}` | {row.from_original:.1e} | {stock} |")
    return "\n".join(lines)


def section(page: str) -> tuple[str, str, str]:
    """The page before the table, the table, and the page after it."""
    before, rest = page.split(START)
    inside, after = rest.split(END)
    return before + START, inside.strip(), END + after


if __name__ == "__main__":
    logging.disable_progress_bar()
    before, _, after = section(PAGE.read_text(encoding="utf-8"))
    found = table([measure(name) for name in VARIANTS])
    PAGE.write_text(f"{before}\n{found}\n{after}", encoding="utf-8")
    print(found)
