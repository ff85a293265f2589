"""Ours: the README's launch line with the default callbacks and metrics; steps are timed by `metrics.jsonl`."""

import json
import subprocess
import sys

import numpy as np
from workloads import (
    BETAS,
    EPSILON,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    WEIGHT_DECAY,
    WORKLOADS,
    Z_LOSS_WEIGHT,
    Workload,
    rival_options,
    tell,
)

LAUNCH = ["-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/cpu.yaml", "train_hf.py"]


def configuration(work: Workload, folder: str, steps: int) -> dict[str, object]:
    """The run as nested sections (YAML reads JSON)."""
    return {
        "name": "speed",
        "model": {
            "config": {
                "hidden_size": work.hidden_size,
                "num_hidden_layers": work.num_layers,
                "num_attention_heads": work.num_heads,
                "num_key_value_heads": work.num_heads,
                "intermediate_size": work.intermediate_size,
                "vocab_size": work.vocab_size,
                "eos_token_id": 0,
                "pad_token_id": 1,
            }
        },
        "data": {"paths": [f"{folder}/tokens.npy"], "token_dtype": "uint16", "sequence_length": work.sequence_length},
        "training": {
            "output_dir": f"{folder}/ours",
            "max_duration": steps,
            "global_train_batch_size": work.global_batch,
            "per_device_train_batch_size": work.micro_batch,
            "learning_rate": LEARNING_RATE,
            "adam_beta1": BETAS[0],
            "adam_beta2": BETAS[1],
            "adam_epsilon": EPSILON,
            "weight_decay": WEIGHT_DECAY,
            "max_grad_norm": MAX_GRAD_NORM,
            "z_loss_weight": Z_LOSS_WEIGHT,
            "scheduler": {"warmup": 2},
            "save_interval": None,
            "save_at_start": False,
            "resume": "never",
        },
        "callbacks": {"speed_monitor": {}, "data_indices": {}, "console": {}},
    }


def main() -> int:
    options = rival_options()
    folder = options.folder.resolve()
    path = folder / "ours.yaml"
    path.write_text(json.dumps(configuration(WORKLOADS[options.workload], str(folder), options.steps)))
    words = [sys.executable, *LAUNCH, str(path), *(["--training.torch_compile=true"] * options.compile)]
    done = subprocess.run(words, stdout=sys.stderr)
    if done.returncode != 0:
        return done.returncode
    rows = [json.loads(line) for line in (folder / "ours" / "metrics.jsonl").read_text().splitlines()]
    marks = [row["time"] for row in rows if "train/CrossEntropyLoss" in row]
    # One fewer than steps: the first row ends a step whose start is not on record.
    tell(list(np.diff(marks)), of_children=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
