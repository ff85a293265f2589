"""Ways to spread a run over processes, and how far two runs are apart."""

import gzip
from pathlib import Path

import torch
import yaml

from olmo_hf.config_file import load_run
from olmo_hf.model.build import build_model
from tests import runs
from tests.invariants.test_split import FSDP
from tests.served import Ranks

HSDP = {
    **FSDP,
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2",
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2",
}
WAYS: dict[str, tuple[int, dict[str, str]]] = {
    "1 process": (1, {}),
    "2 DDP": (2, {}),
    "2 FSDP2": (2, FSDP),
    "4 FSDP2": (4, FSDP),
    "2x2 HSDP": (4, HSDP),
}
"""Number of processes, and what the launcher would put into their environment."""

CLIPPINGS = {
    "by the global norm": {"max_grad_norm": 0.5},
    "by each tensor's running norm": {"max_grad_norm": 0.0, "max_grad_norm_ratio": 1.0},
}


def run(way: str, directory: Path, *, init_from: Path | None = None, **training: object) -> Path:
    """A run with unequal numbers of labels in its instances; returns its directory."""
    count, env = WAYS[way]
    config = runs.write_run(directory, dropout=0.0, label_masks=True, **training)
    if init_from is not None:
        config.write_text(
            yaml.safe_dump(yaml.safe_load(config.read_text()) | {"model": {"init_from": str(init_from)}})
        )
    ranks = Ranks(count, **env)
    try:
        ranks.run(config)
    finally:
        ranks.close()
    return directory / "run"


def nudged_weights(run_dir: Path, target: Path, *, seed: int) -> Path:
    """The weights that a run began with, each moved to the next float32 number above or below; a model directory."""
    run = load_run(run_dir.parent / "run.yaml", [])
    model = build_model(run.model, seed=run.training.seed, max_position_embeddings=run.data.sequence_length)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            up = torch.rand(weight.shape, generator=generator) < 0.5
            weight.copy_(torch.nextafter(weight, torch.where(up, torch.inf, -torch.inf)))
    model.save_pretrained(target)
    return target


def instances(run_dir: Path) -> dict[int, list[int]]:
    """Instances of each step over all ranks, sorted."""
    found: dict[int, list[int]] = {}
    for path in run_dir.glob("data-indices/rank*.tsv.gz"):
        with gzip.open(path, "rt") as file:
            for line in file:
                step, ids = line.rstrip("\n").split("\t")[:2]
                found.setdefault(int(step), []).extend(map(int, ids.split(",")))
    return {step: sorted(ids) for step, ids in found.items()}


def largest_differences(one: Path, other: Path) -> tuple[float, float]:
    """Largest relative difference of a step's loss and of its gradient norm."""
    a, b = runs.losses(one), runs.losses(other)
    assert list(a) == list(b)
    pairs = [(a[step], b[step]) for step in a]
    loss, norm = (max(abs(x[i] - y[i]) / abs(x[i]) for x, y in pairs) for i in (0, 1))
    return loss, norm
