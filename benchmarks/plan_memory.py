"""What `olmo-hf plan` says of memory, against what runs really hold and against torch's FSDP memory tracker.

python benchmarks/plan_memory.py [--tracker-only | --cases WORDS]

Runs: a tiny model and one of 34 million parameters (the shape of OLMo 20M) on one and two CPU processes; counted are
all allocations of torch in steps 2 and 3, the largest of any rank. Tracker: a step on tensors without content, up to a
billion parameters on 64 ranks that do not exist.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from olmo_hf.model.configuration_olmo import OlmoHfConfig  # noqa: E402
from olmo_hf.recipes.memory import MemorySettings, estimate_memory  # noqa: E402
from olmo_hf.recipes.step_memory import StepSettings  # noqa: E402
from tests import runs  # noqa: E402
from tests.invariants.test_split import FSDP  # noqa: E402

TARGET = 0.10
LENGTH = 256
TINY = {
    "vocab_size": 4224,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
}
MEDIUM = {
    "vocab_size": 50304,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
}
LARGE = {
    "vocab_size": 100352,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
}
STEP = StepSettings(
    micro_batch=4,
    sequence_length=LENGTH,
    half=False,
    activation_checkpointing=None,
    loss_implementation="chunked",
    loss_chunk_tokens=1024,
    sharding="none",
    shards=1,
    accumulates=False,
)
# (name, model, ranks, changes to STEP)
RUNS: list[tuple[str, dict[str, int], int, dict[str, Any]]] = [
    ("tiny", TINY, 1, {}),
    ("tiny, 2 micro-batches", TINY, 1, {"accumulates": True}),
    ("tiny, plain loss", TINY, 1, {"loss_implementation": "plain"}),
    ("tiny, whole_layer", TINY, 1, {"activation_checkpointing": "whole_layer"}),
    ("tiny, DDP", TINY, 2, {}),
    ("tiny, FSDP2", TINY, 2, {"sharding": "full"}),
    ("tiny, FSDP2 shard grad op", TINY, 2, {"sharding": "grad"}),
    ("34M", MEDIUM, 1, {"micro_batch": 2}),
    ("34M, DDP", MEDIUM, 2, {"micro_batch": 2}),
    ("34M, FSDP2", MEDIUM, 2, {"micro_batch": 2, "sharding": "full"}),
    ("34M, FSDP2, 2 micro-batches", MEDIUM, 2, {"micro_batch": 2, "sharding": "full", "accumulates": True}),
    (
        "34M, FSDP2 shard grad op, 2 micro-batches",
        MEDIUM,
        2,
        {"micro_batch": 2, "sharding": "grad", "accumulates": True},
    ),
    ("34M, bfloat16", MEDIUM, 1, {"micro_batch": 2, "half": True}),
    ("34M, FSDP2, bfloat16", MEDIUM, 2, {"micro_batch": 2, "sharding": "full", "half": True}),
]
TRACKED: list[tuple[str, dict[str, int], int, dict[str, Any]]] = [
    ("tiny", TINY, 8, {"sharding": "full"}),
    ("tiny, shard grad op", TINY, 8, {"sharding": "grad"}),
    ("34M, whole_layer", MEDIUM, 4, {"sharding": "full", "activation_checkpointing": "whole_layer"}),
    ("34M, plain loss", MEDIUM, 4, {"sharding": "full", "loss_implementation": "plain"}),
    ("34M, bfloat16", MEDIUM, 8, {"sharding": "full", "half": True}),
    ("1.3B, bfloat16", LARGE, 64, {"sharding": "full", "half": True, "sequence_length": 1024}),
]


def step_of(ranks: int, changes: dict[str, Any]) -> StepSettings:
    """The step of a case."""
    shards = ranks if changes.get("sharding", "none") != "none" else 1
    return dataclasses.replace(STEP, shards=shards, **changes)


def planned(model: dict[str, int], ranks: int, step: StepSettings) -> int:
    """Bytes by the plan."""
    settings = MemorySettings(num_devices=ranks, optimizer="adamw", step=step)
    return estimate_memory(settings, OlmoHfConfig(**model)).total


def measured(directory: Path, model: dict[str, int], ranks: int, step: StepSettings) -> int:
    """Bytes by the allocator's record of a run of three steps; the largest of any rank."""
    passes = 2 if step.accumulates else 1
    config = runs.write_run(
        directory,
        dropout=0.0,
        max_duration=3,
        save_interval=None,
        save_interval_ephemeral=None,
        save_at_start=False,
        loss_implementation=step.loss_implementation,
        bf16=step.half,
        use_cpu=True,
        per_device_train_batch_size=step.micro_batch,
        global_train_batch_size=step.micro_batch * passes * ranks,
    )
    settings = yaml.safe_load(config.read_text())
    settings["model"] = {"config": model | {"eos_token_id": 0, "pad_token_id": 1}}
    settings["model"]["activation_checkpointing"] = step.activation_checkpointing
    settings["data"]["sequence_length"] = step.sequence_length
    config.write_text(yaml.safe_dump(settings))
    np.random.default_rng(0).integers(0, 4000, 64 * step.sequence_length, dtype=np.uint16).tofile(
        directory / "tokens.npy"
    )
    reshard = {"FSDP_RESHARD_AFTER_FORWARD": "false"} if step.sharding == "grad" else {}
    env = {} if step.sharding == "none" else {**FSDP, **reshard}
    out, script = directory / "out.json", ROOT / "tests" / "measured_memory.py"
    process = runs.start(out, str(config), processes=ranks, script=script, **env)
    assert process.wait(timeout=560) == 0, (directory / "log.txt").read_text()[-3000:]
    return max(json.loads(path.read_text())["peak"] for path in directory.glob("out.json.rank*"))


def tracked(model: dict[str, int], step: StepSettings) -> int:
    """Bytes by torch's tracker."""
    given = json.dumps({"fields": model, "step": dataclasses.asdict(step)})
    script = str(ROOT / "tests" / "tracked_memory.py")
    done = subprocess.run(
        [sys.executable, script, given], capture_output=True, text=True, env=runs.environment(), check=True
    )
    return int(done.stdout.split()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tracker-only", action="store_true", help="no runs, only torch's tracker")
    parser.add_argument("--cases", default="", help="runs with this in their name, and no tracker")
    given = parser.parse_args()
    worst = 0.0
    print("| case | ranks | planned | found | difference |\n|---|---|---|---|---|")

    def show(name: str, ranks: int, plan: int, found: int) -> None:
        nonlocal worst
        worst = max(worst, abs(plan - found) / found)
        print(
            f"| {name} | {ranks} | {plan / 1e6:,.1f} MB | {found / 1e6:,.1f} MB | {plan / found - 1:+.1%} |",
            flush=True,
        )

    with tempfile.TemporaryDirectory() as directory:
        chosen = [] if given.tracker_only else [run for run in RUNS if given.cases in run[0]]
        for number, (name, model, ranks, changes) in enumerate(chosen):
            step = step_of(ranks, changes)
            found = measured(Path(directory) / str(number), model, ranks, step)
            show(f"run: {name}", ranks, planned(model, ranks, step), found)
    for name, model, ranks, changes in [] if given.cases else TRACKED:
        step = dataclasses.replace(step_of(ranks, changes), inside_kernels=False)
        show(f"tracker: {name}", ranks, planned(model, ranks, step), tracked(model, step))
    print(f"largest difference {worst:.1%}, target {TARGET:.0%}")
    return 0 if worst <= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
