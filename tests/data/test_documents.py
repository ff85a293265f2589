"""Document lengths against the original's."""

import json
from pathlib import Path

import numpy as np

from olmo_hf.data.documents import document_lengths

CASES = json.loads((Path(__file__).parents[1] / "golden/04_memmap/doc_lengths.json").read_text())


def test_lengths_equal_the_originals() -> None:
    assert CASES
    for case in CASES:
        lengths = document_lengths(np.array(case["input_ids"]), case["eos_token_id"])
        assert lengths.tolist() == case["doc_lens"]
        assert lengths.dtype == np.int32
