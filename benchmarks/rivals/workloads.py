"""The work that every rival is given: model, batch and data, in numbers only (also read by foreign interpreters)."""

import argparse
import json
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Workload:
    """An OLMo-2 model and its batch; fp32, AdamW, clipping at 1.0, z-loss 1e-5."""

    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    sequence_length: int  # tokens
    vocab_size: int
    global_batch: int  # instances
    micro_batch: int  # instances

    @property
    def accumulation(self) -> int:
        return self.global_batch // self.micro_batch

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.sequence_length

    @property
    def shape(self) -> dict[str, int]:
        """The model's sizes in the words of Hugging Face."""
        return {
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "intermediate_size": self.intermediate_size,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.sequence_length,
        }


WORKLOADS = {
    "S": Workload(256, 8, 8, 1024, 512, 8192, 16, 4),
    "M": Workload(512, 8, 8, 2048, 1024, 50304, 4, 1),
    "none": Workload(32, 1, 2, 64, 16, 128, 4, 1),  # almost no arithmetic: what is left is the loop
}
LEARNING_RATE, BETAS, EPSILON, WEIGHT_DECAY = 4e-4, (0.9, 0.95), 1e-8, 0.1
MAX_GRAD_NORM, Z_LOSS_WEIGHT = 1.0, 1e-5


def write_tokens(workload: Workload, path: Path, *, steps: int) -> Path:
    """A file of uint16 tokens for `steps` steps; small ids are frequent, as in text."""
    rng = np.random.default_rng(0)
    size = (steps + 1) * workload.tokens_per_step
    tokens = np.minimum(rng.zipf(1.2, size), workload.vocab_size) - 1
    tokens.astype(np.uint16).tofile(path)
    return path


def rival_options() -> argparse.Namespace:
    """The command line of a rival."""
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=list(WORKLOADS))
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="has tokens.npy; may be written to")
    parser.add_argument("--compile", action="store_true")
    return parser.parse_args()


def tell(seconds: list[float], *, of_children: bool = False) -> None:
    """What a rival reports: seconds of each step, and the peak of its resident memory (or of its largest child)."""
    whose = resource.RUSAGE_CHILDREN if of_children else resource.RUSAGE_SELF
    peak = resource.getrusage(whose).ru_maxrss * 1024
    sys.stdout.write("\nRESULT " + json.dumps({"seconds": seconds, "peak_bytes": peak}) + "\n")
