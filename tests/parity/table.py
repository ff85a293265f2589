"""The parity table for people: python -m tests.parity.table prints it as Markdown.

One row per architecture of the original: the largest difference of its logits from the recorded ones, and, where stock
transformers has the architecture, from the stock class with the same weights.
"""

import tempfile

import torch
from transformers import Olmo2ForCausalLM, OlmoForCausalLM
from transformers.utils import logging

from tests.parity.original import VARIANTS, load_variant
from tests.parity.test_original_variants import queries_with_keys

STOCK_CLASSES = {"olmo2": Olmo2ForCausalLM, "olmo": OlmoForCausalLM}


@torch.no_grad()
def rows() -> list[tuple[str, str, float, float | None]]:
    """(architecture, model type when saved, largest difference from the original, and from stock transformers)."""
    found = []
    for name in VARIANTS:
        variant = load_variant(name)
        inputs = {"input_ids": variant.input_ids, "attention_mask": variant.attention_mask}
        logits = variant.model(**inputs).logits
        where = queries_with_keys(variant)
        from_original = (logits - variant.tensors["logits"])[where].abs().max().item()
        stock, from_stock = variant.model.config.stock_model_type, None
        if stock is not None:
            with tempfile.TemporaryDirectory() as directory:
                variant.model.save_pretrained(directory)
                twin = STOCK_CLASSES[stock].from_pretrained(directory).eval()
            from_stock = (logits - twin(**inputs).logits)[where].abs().max().item()
        found.append((name, variant.model.config.to_dict()["model_type"], from_original, from_stock))
    return found


def table() -> str:
    """Markdown."""
    lines = [
        "| architecture | saved as | largest difference from the original | from stock transformers |",
        "|---|---|---|---|",
    ]
    for name, saved_as, original, stock in rows():
        lines.append(f"| {name} | `{saved_as}` | {original:.1e} | {'-' if stock is None else f'{stock:.1g}'} |")
    return "\n".join(lines)


if __name__ == "__main__":
    logging.disable_progress_bar()
    print(table())
