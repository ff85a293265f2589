"""Parts of a training step done in several ways, side by side: which of them are faster on this machine.

python benchmarks/ideas.py [S M] [--rounds 15] [--threads 2]

Per part and way, the median milliseconds of one call, in turns with the other ways, with the shapes of a micro-batch
(or of the whole model, for clipping and the update) of the works S and M; the way that training takes comes first and
the others are given as multiples of it. The machine should be idle. What follows from it: docs/log.md.

Shapes: `B` instances of a micro-batch, `S` positions, `D` hidden size, `H` heads, `C` head size.
"""

import argparse
import atexit
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks" / "rivals")]

import torch  # noqa: E402
from own_loop import own_model  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from workloads import BETAS, EPSILON, LEARNING_RATE, WEIGHT_DECAY, WORKLOADS, Workload, write_tokens  # noqa: E402

from benchmarks.measuring.surroundings import surroundings  # noqa: E402
from olmo_hf.data.collator import DataCollator  # noqa: E402
from olmo_hf.data.memmap import MemMapDataset  # noqa: E402
from olmo_hf.model.training_ops import RMSNorm  # noqa: E402
from olmo_hf.training.clipping import clip_by_global_norm, gradient_norms  # noqa: E402

Ways = dict[str, Callable[[], object]]
"""By name; the first is what training does."""


def with_backward(call: Callable[[], torch.Tensor], inputs: list[torch.Tensor]) -> Callable[[], object]:
    """A forward pass and the gradients of all its inputs."""
    grad = torch.randn_like(call())
    return lambda: torch.autograd.grad(call(), inputs, grad)


def norms(work: Workload) -> Ways:
    x = torch.randn(work.micro_batch * work.sequence_length, work.hidden_size, requires_grad=True)  # (B S, D)
    weight, eps = torch.ones(work.hidden_size, requires_grad=True), 1e-6

    def formula() -> torch.Tensor:
        return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))

    calls = {
        "backward written out": lambda: RMSNorm.apply(x, weight, eps),
        "formula": formula,
        "F.rms_norm": lambda: F.rms_norm(x, (work.hidden_size,), weight, eps),
    }
    return {name: with_backward(call, [x, weight]) for name, call in calls.items()}


def attention(work: Workload) -> Ways:
    shape = (work.micro_batch, work.sequence_length, work.num_heads, work.hidden_size // work.num_heads)
    q, k, v = (torch.randn(shape).transpose(1, 2).requires_grad_() for _ in range(3))  # (B, H, S, C)
    mask = torch.ones(work.sequence_length, work.sequence_length, dtype=torch.bool).tril()  # (S, S)
    calls = {
        "sdpa, causal flag": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        "sdpa, mask tensor": lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask),
    }
    return {name: with_backward(call, [q, k, v]) for name, call in calls.items()}


def projections(work: Workload) -> Ways:
    width = work.hidden_size
    x = torch.randn(work.micro_batch * work.sequence_length, width, requires_grad=True)  # (B S, D)
    whole = torch.randn(3 * width, width, requires_grad=True)  # (3 D, D)
    three = [part.detach().clone().requires_grad_() for part in whole.chunk(3)]
    grad = torch.randn(len(x), 3 * width)
    parts = grad.chunk(3, dim=-1)
    return {
        "q, k, v each": lambda: torch.autograd.grad([F.linear(x, one) for one in three], [x, *three], parts),
        "q, k, v in one": lambda: torch.autograd.grad(F.linear(x, whole), [x, whole], grad),
    }


def clipping(work: Workload) -> Ways:
    parameters = list(own_model(work).parameters())
    for one in parameters:
        one.grad = torch.randn_like(one)

    def ours() -> None:
        clip_by_global_norm(parameters, gradient_norms(parameters), max_norm=1.0)

    return {
        "norms by tensor and scaling, foreach": ours,
        "clip_grad_norm_, foreach": lambda: torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True),
        "clip_grad_norm_, a loop": lambda: torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=False),
    }


def updates(work: Workload) -> Ways:
    parameters = list(own_model(work).parameters())
    for one in parameters:
        one.grad = torch.randn_like(one)

    def way(**how: bool) -> Callable[[], object]:
        return torch.optim.AdamW(
            parameters, lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, weight_decay=WEIGHT_DECAY, **how
        ).step

    return {"AdamW fused": way(fused=True), "AdamW foreach": way(foreach=True), "AdamW, a loop": way(foreach=False)}


def loading(work: Workload) -> Ways:
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    path = write_tokens(work, Path(folder) / "tokens.npy", steps=4)
    dataset = MemMapDataset([str(path)], sequence_length=work.sequence_length, token_dtype="uint16")
    collate = DataCollator(pad_token_id=1)
    rows = list(range(work.micro_batch))
    return {"a micro-batch read and put together": lambda: collate(dataset.__getitems__(rows))}


PARTS: tuple[Callable[[Workload], Ways], ...] = (norms, attention, projections, clipping, updates, loading)


def milliseconds(ways: Ways, rounds: int) -> dict[str, float]:
    """Medians; the ways take turns, and two rounds to warm up do not count."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 2):
        for name, call in ways.items():
            began = time.perf_counter()
            call()
            found[name].append((time.perf_counter() - began) * 1e3)
    return {name: statistics.median(times[2:]) for name, times in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=["S", "M"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print("\n".join(surroundings()))
    for name in options.workloads:
        work = WORKLOADS[name]
        print(f"\n## {name}: {work}\n\n| part | way | ms | times the first |\n|---|---|---|---|")
        for part in PARTS:
            found = milliseconds(part(work), options.rounds)
            first = next(iter(found.values()))
            for way, value in found.items():
                print(f"| {part.__name__} | {way} | {value:.3f} | {value / first:.2f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
