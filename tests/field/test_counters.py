"""What a run counts: every token of every rank once, on one grid of steps, across restarts and beside evaluations."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml
from transformers import Olmo2Config, Olmo2ForCausalLM

from olmo_hf.callbacks.data_indices import data_indices_path, read_data_indices
from olmo_hf.callbacks.json_lines import METRICS_FILE, read_json_lines
from olmo_hf.data.memmap import MemMapDataset
from olmo_hf.training.state import load_run_state
from tests import runs
from tests.forks import Forks
from tests.served import Ranks


@pytest.fixture(scope="module")
def ddp(forks: Forks) -> Iterator[Ranks]:
    """Two processes with a copy of the model each."""
    ranks = Ranks(2, forks)
    yield ranks
    ranks.close()


def changed(config: Path, **sections: dict) -> Path:
    """The configuration with these sections replaced."""
    config.write_text(yaml.safe_dump({**yaml.safe_load(config.read_text()), **sections}))
    return config


def test_tokens_of_two_ranks_before_and_after_a_restart(ddp: Ranks, tmp_path: Path) -> None:
    """Two ranks, two passes a step, two instances a pass, 16 tokens each: 128 a step, evaluations or not."""
    config = runs.write_run(tmp_path, max_duration=10, save_interval=None, logging_steps=2)
    data = yaml.safe_load(config.read_text())["data"]
    changed(config, evaluation={"interval": 2, "evaluators": [{"label": "held-out", "data": data}]})
    ddp.run(config, "--training.stop_at=5")
    run_dir = tmp_path / "run"
    assert load_run_state(run_dir / "latest").tokens == 640
    assert json.loads((run_dir / "latest" / "trainer_state.json").read_text())["num_input_tokens_seen"] == 640
    ddp.run(config)
    assert load_run_state(run_dir / "latest").tokens == 1280
    rows = list(read_json_lines(run_dir / METRICS_FILE))
    assert all(row["tokens"] == 128 * row["step"] for row in rows), "training and evaluation share one axis"
    trained = {row["step"]: row["throughput/total_tokens"] for row in rows if "throughput/total_tokens" in row}
    assert trained == {step: 128 * step for step in (2, 4, 5, 6, 8, 10)}, "the grid is the same after the restart"
    evaluated = [row["step"] for row in rows if "eval/held-out/CrossEntropyLoss" in row]
    assert evaluated == [2, 4, 5, 6, 8, 10]


def test_a_published_model_is_gone_on_with(ddp: Ranks, tmp_path: Path) -> None:
    """The first loss is the one that stock transformers computes of the same instances; the optimizer is new."""
    config = runs.write_run(tmp_path, max_duration=1, save_interval=None)
    shape = yaml.safe_load(config.read_text())["model"]["config"] | {"attention_dropout": 0.0}
    torch.manual_seed(3)
    stock = Olmo2ForCausalLM(Olmo2Config(**shape)).eval()
    stock.save_pretrained(tmp_path / "published")
    changed(config, model={"init_from": str(tmp_path / "published")})
    text = ddp.run(config)
    assert f"with the weights of {tmp_path}/published and a new optimizer" in text
    ids = [i for rank in (0, 1) for i in read_data_indices(data_indices_path(tmp_path / "run", rank))[1]]
    data = MemMapDataset([tmp_path / "tokens.npy"], sequence_length=16, token_dtype="uint16")
    rows = torch.stack([data[i]["input_ids"] for i in ids])  # (B, S)
    with torch.no_grad():
        logits = stock(rows).logits
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten()).item()
    # float32 at 4.9 rounds to 2.4e-7; 120 targets are summed
    assert runs.losses(tmp_path / "run")[1][0] == pytest.approx(expected, abs=2e-6)
