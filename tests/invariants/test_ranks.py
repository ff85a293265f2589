"""Ways to spread a run over processes, with ragged labels and both kinds of clipping: the same losses and instances.

`benchmarks/ranks.py` is the whole matrix over 30 steps.
"""

from pathlib import Path

import pytest

from tests import runs, ways

STEPS = 6


@pytest.mark.parametrize("clipping", ways.CLIPPINGS, ids=["global", "adaptive"])
def test_two_ranks(request: pytest.FixtureRequest, tmp_path: Path, clipping: str) -> None:
    settings = {"max_duration": STEPS, "save_interval_ephemeral": None, **ways.CLIPPINGS[clipping]}
    for name in ("one", "ddp", "fsdp"):
        ranks = request.getfixturevalue(name)
        ranks.run(runs.write_run(tmp_path / name, dropout=0.0, label_masks=True, **settings))
    for name in ("ddp", "fsdp"):
        loss, norm = ways.largest_differences(tmp_path / "one" / "run", tmp_path / name / "run")
        assert loss < 1e-5
        assert norm < 1e-4  # as in test_split: AdamW magnifies roundings of moments near 0
        assert ways.instances(tmp_path / "one" / "run") == ways.instances(tmp_path / name / "run")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["4 FSDP2", "2x2 HSDP"])
def test_four_ranks(tmp_path: Path, way: str) -> None:
    settings = {"max_duration": STEPS, "save_interval_ephemeral": None, **ways.CLIPPINGS["by the global norm"]}
    one, four = (ways.run(name, tmp_path / name.replace(" ", ""), **settings) for name in ("1 process", way))
    loss, norm = ways.largest_differences(one, four)
    assert loss < 1e-5
    assert norm < 1e-4
    assert ways.instances(one) == ways.instances(four)
