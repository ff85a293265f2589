"""Runs of the original trainer, set up and run again through `train_hf.py`: for the tests and for `docs/parity.md`."""

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from safetensors.torch import load_file

import train_hf
from olmo_hf.cli import main as cli
from olmo_hf.training.clipping import clip_group_name
from tests import runs
from tests.golden.native import parts_of, save_as_checkpoint, to_hf

GOLDEN = Path(__file__).parent / "10_trajectories"
RUNS = json.loads((GOLDEN / "index.json").read_text())
HALF_WAY = GOLDEN.parent / "11_checkpoints" / "step30-unsharded"
"""The original's checkpoint from which the t04 runs go on."""

SPREAD_FACTOR = 5
SMALLEST_CE, SMALLEST_NORM, SMALLEST_WEIGHT = 2e-5, 1e-4, 2e-5
"""Tolerances are never below these (absolute, relative, absolute)."""


def our_settings(name: str, directory: Path) -> dict[str, Any]:
    """The original's configuration in this package's words; the z-loss weight is what the original really used."""
    config = RUNS[name]["config"]
    optimizer, scheduler, data = config["optimizer"], config["scheduler"], config["data"]
    z_loss_weight = (1e-5 if name == "t01z_multiplier_honoured" else 1e-4) if config["softmax_auxiliary_loss"] else 0.0
    filtered = data.get("instance_filter")
    ratio = config["max_grad_norm_ratio"]
    clip_warmup = {key: scheduler.get(f"{key}_steps" if key == "grad_clip_warmup" else key) for key in CLIP_WARMUP}
    return {
        "name": "golden",
        "model": {"init_from": str(directory / "init")},
        "data": {
            "paths": [str(GOLDEN / path) for path in data["paths"]],
            "label_mask_paths": [str(GOLDEN / path) for path in data.get("label_mask_paths", [])],
            "token_dtype": "uint16",
            "sequence_length": config["model"]["max_sequence_length"],
            "seed": data.get("seed"),
            "instance_filter": filtered,
        },
        "training": {
            "output_dir": str(directory / "run"),
            # the original runs ten steps on when stop_at is not set; here they are asked for
            "max_duration": 70 if name == "t00_no_stop_at" else config["max_duration"],
            "stop_at": config["stop_at"],
            "stop_after": config.get("stop_after"),
            "global_train_batch_size": config["global_train_batch_size"],
            "per_device_train_batch_size": config["device_train_microbatch_size"],
            "seed": config["seed"],
            "optimizer": {"adamw": "adamw", "lionw": "lion"}[optimizer["name"]],
            "fused_adamw": False,
            "selective_updates": optimizer.get("selective_updates", False),
            "learning_rate": optimizer["learning_rate"],
            "weight_decay": optimizer["weight_decay"],
            "adam_beta1": optimizer["betas"][0],
            "adam_beta2": optimizer["betas"][1],
            "adam_epsilon": optimizer["eps"],
            "decay_norm_and_bias": optimizer["decay_norm_and_bias"],
            "decay_embeddings": optimizer["decay_embeddings"],
            "max_grad_norm": 0.0 if config["max_grad_norm"] is None else config["max_grad_norm"],
            "max_grad_norm_ratio": 0.0 if ratio is None else ratio,
            "z_loss_weight": z_loss_weight,
            "loss_denominator": "batch_tokens",
            **continuation(name, directory),
            "scheduler": {
                "name": scheduler["name"],
                "units": scheduler["units"],
                "warmup": scheduler["t_warmup"],
                "t_max": scheduler["t_max"],
                "alpha_f": scheduler["alpha_f"],
                "warmup_min_lr": scheduler["warmup_min_lr"],
                **clip_warmup,
            },
            "save_interval": None,
            "save_at_start": False,
            "optimizer_metrics_steps": 1,  # the norm of every gradient, to compare them all
        },
        "callbacks": {"console": None},
    }


def continuation(name: str, directory: Path) -> dict[str, Any]:
    """What the runs that start from the original's checkpoint reset, skip or keep."""
    config = RUNS[name]["config"]
    if RUNS[name]["load_checkpoint"] is None:
        return {}
    resets = config.get("reset_optimizer_state", False)
    # without its data position the original starts counting at zero too
    restarts = config.get("reset_trainer_state", False) or not config.get("restore_dataloader", True)
    return {
        "resume": str(directory / "init"),
        "reset_optimizer": resets,
        "reset_trainer_state": restarts,
        "fast_forward_batches": config.get("fast_forward_batches", 0),
        "start_epoch": config.get("epoch"),
        # the original warms up again whenever the optimizer was reset and the counters were not
        "bolt_on_warmup": config["scheduler"]["t_warmup"] if resets and not restarts else 0,
    }


def write_start(name: str, directory: Path) -> None:
    """The weights a run starts from, or the original's checkpoint made ours."""
    if RUNS[name]["load_checkpoint"] is None:
        save_as_checkpoint(GOLDEN / "init.safetensors", RUNS[name]["config"]["model"], directory / "init")
    else:
        assert cli.main(["convert", str(HALF_WAY), str(directory / "init")]) == 0


CLIP_WARMUP = ("grad_clip_warmup", "grad_clip_warmup_factor")


@dataclass
class Pair:
    """A run of ours beside the original's."""

    name: str
    run_dir: Path
    ours: dict[str, np.ndarray]
    theirs: Any
    spread: dict[str, float]

    @property
    def tolerances(self) -> dict[str, float]:
        """Of cross-entropy (absolute, all steps), gradient norm (relative, all steps) and weights (absolute)."""
        return {
            "ce": max(SMALLEST_CE, SPREAD_FACTOR * self.spread["loss_ce_maxabs"]),
            "norm": max(SMALLEST_NORM, SPREAD_FACTOR * self.spread["grad_norm_maxrel"]),
            "weight": max(SMALLEST_WEIGHT, SPREAD_FACTOR * self.spread["final_weights_maxabs"]),
        }

    def fused(self, kind: str, native_names: Any) -> np.ndarray:
        """Our norms of `kind` (`grad`) for the original's tensors, (steps, tensors)."""
        columns = []
        for name in native_names:
            parts = [self.ours[f"optim/{kind}/{part}.norm"] for part in parts_of(str(name))]
            columns.append(np.sqrt(sum(part**2 for part in parts)))
        return np.stack(columns, axis=1)

    def memory(self, native_names: Any) -> np.ndarray:
        """Our running norms of adaptive clipping for the original's tensors, (steps, tensors)."""
        groups = [clip_group_name(parts_of(str(name))[0]) for name in native_names]
        return np.stack([self.ours[f"optim/grad_norm_exp_avg/{group}"] for group in groups], axis=1)

    @property
    def has_weights(self) -> bool:
        """Whether the final weights were recorded, not only norms and first elements of them."""
        return any(key.startswith("final/") for key in self.theirs.files)

    def weight_difference(self) -> float:
        """Largest difference of the final weights; of norm and first elements of each tensor where only these were
        recorded."""
        ours = load_file(self.run_dir / "latest" / "model.safetensors")
        native = {k[6:]: torch.from_numpy(self.theirs[k]) for k in self.theirs.files if k.startswith("final/")}
        if native:
            expected = to_hf({name.removeprefix("module."): tensor for name, tensor in native.items()})
            assert ours.keys() == expected.keys()
            return max((ours[name] - tensor).abs().max().item() for name, tensor in expected.items())
        differences = []
        names, first, norms = (self.theirs[f"final_{key}"] for key in ("names", "first8", "l2norm"))
        for name, elements, norm in zip(names, first, norms, strict=True):
            parts = [ours[part].double() for part in parts_of(str(name))]
            differences.append(abs(sum(part.square().sum().item() for part in parts) ** 0.5 - norm))
            differences.append(np.abs(parts[0].flatten()[:8].numpy() - elements).max())
        return float(max(differences))

    def instances_are_equal(self) -> bool:
        """Whether every rank read the same instances in the same order at every step."""
        same = []
        for rank, key in ((0, "instance_indices"), (1, "instance_indices_rank1")):
            if key in self.theirs.files:
                with gzip.open(self.run_dir / "data-indices" / f"rank{rank}.tsv.gz", "rt") as file:
                    rows = [line.rstrip("\n").split("\t") for line in file]
                same.append([[int(i) for i in row[1].split(",")] for row in rows] == self.theirs[key].tolist())
        return len(same) == RUNS[self.name]["world_size"] and all(same)


def metrics_of(run_dir: Path) -> dict[str, np.ndarray]:
    """Columns of the training lines of `metrics.jsonl`; nan where a line lacks one."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "train/CrossEntropyLoss" in line]
    numbers = [{k: v for k, v in line.items() if isinstance(v, int | float)} for line in lines]
    keys = {key for row in numbers for key in row}
    return {key: np.array([row.get(key, np.nan) for row in numbers]) for key in keys}


def train_on_ranks(config: Path, world_size: int) -> None:
    """Train with several processes, as a user does."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
    subprocess.run([*launcher, str(runs.ROOT / "train_hf.py"), str(config)], env=runs.environment(), check=True)


def run_again(name: str, directory: Path, on_ranks: Callable[[Path, int], object] = train_on_ranks) -> Pair:
    """Train as the original did in this run, with one process in this one; `on_ranks` starts several."""
    write_start(name, directory)
    (directory / "run.yaml").write_text(yaml.safe_dump(our_settings(name, directory)))
    config, world_size = directory / "run.yaml", RUNS[name]["world_size"]
    if world_size == 1:
        assert train_hf.main([str(config)]) == 0
    else:
        on_ranks(config, world_size)
    variants = RUNS[name]["spread_vs_reference"].values()
    keys = ("loss_ce_maxabs", "grad_norm_maxrel", "final_weights_maxabs")
    spread = {key: max(variant[key] for variant in variants) for key in keys}
    return Pair(name, directory / "run", metrics_of(directory / "run"), np.load(GOLDEN / f"{name}.npz"), spread)
