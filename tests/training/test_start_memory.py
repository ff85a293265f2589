"""No rank holds the whole model at the start; `benchmarks/start_memory.py` measures larger ones and restarts."""

from pathlib import Path

import pytest

from olmo_hf.model.configuration_olmo import OlmoHfConfig
from olmo_hf.model.size import count_parameters
from tests.measured_start import ALLOWANCE_BYTES, fields, measure

MODEL = fields(768, 8, 2048)  # 88 million parameters


@pytest.mark.slow
@pytest.mark.parametrize("restart", [False, True], ids=["start", "restart"])
def test_a_rank_holds_its_part_and_one_block(tmp_path: Path, restart: bool) -> None:
    count = count_parameters(OlmoHfConfig(**MODEL))
    whole, block = 4 * count.total * (3 if restart else 1), 4 * max(count.per_layer, count.embedding)
    constant = measure(tmp_path / "empty", fields(64, 1, 128), 2, restart=restart) + ALLOWANCE_BYTES
    found = measure(tmp_path / "full", MODEL, 2, restart=restart)
    assert found <= whole // 2 + block + constant
    assert whole // 2 + block + constant < whole + constant, "the bound would notice a whole model"
