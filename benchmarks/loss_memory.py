"""Peak memory and time of three losses with z-loss, forward and backward, at a large vocabulary.

python benchmarks/loss_memory.py [--tokens 4096] [--width 512] [--vocab 100352] [--threads 2] [--device cuda]

`textbook` is what one writes with torch's own functions: `cross_entropy`, and `logsumexp` squared; `plain` and
`chunked` are the two of this package; `products` are the three matrix products alone, and no loss can be faster.
All start from the same hidden states and head weight. Memory is the most held at one time beyond these two and their
gradients; every measurement is a process of its own, and they take turns. Time of the processor (all threads) says
more than time by the clock where the machine is busy. Targets: chunked at most an eighth of the
textbook's memory in at most 0.65 of its time.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

IMPLEMENTATIONS = ["textbook", "plain", "chunked", "products"]

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def compute(options: argparse.Namespace, hidden: Any, weight: Any, labels: Any) -> Any:
    """Loss and gradients by the implementation asked for; returns the loss."""
    import torch

    from olmo_hf.training.loss import causal_lm_loss_sums
    from olmo_hf.training.loss_chunked import chunked_causal_lm_loss_sums

    if options.implementation == "products":
        with torch.no_grad():
            for rows in hidden[0].split(options.chunk_tokens):
                logits = rows @ weight.T
                weight.grad.addmm_(logits.T, rows)
                torch.mm(logits, weight)
        return hidden.new_zeros(())
    if options.implementation == "textbook":
        logits, targets = torch.nn.functional.linear(hidden, weight)[0, :-1], labels[0, 1:]
        total = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
        total = total + 1e-5 * logits.logsumexp(-1).square().sum()
    elif options.implementation == "plain":
        logits = torch.nn.functional.linear(hidden, weight)
        total = causal_lm_loss_sums(logits, labels, z_loss_weight=1e-5).total
    else:
        total = chunked_causal_lm_loss_sums(
            hidden, weight, labels, chunk_tokens=options.chunk_tokens, z_loss_weight=1e-5
        ).total
    total.backward()
    return total


def measure(options: argparse.Namespace) -> dict[str, float]:
    """One implementation, in this process."""
    import threading
    import time

    import torch

    import olmo_hf.training.loss_chunked  # noqa: F401  (imported before the clock starts)

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    device = torch.device(options.device)
    hidden = torch.randn(1, options.tokens, options.width, device=device, requires_grad=True)
    weight = (torch.randn(options.vocab, options.width, device=device) * 0.02).requires_grad_()
    labels = torch.randint(options.vocab, (1, options.tokens), device=device)
    hidden.grad, weight.grad = torch.zeros_like(hidden), torch.zeros_like(weight)
    stop, peak = threading.Event(), [0]

    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    def watch() -> None:
        while not stop.is_set():
            peak[0] = max(peak[0], resident_bytes())
            time.sleep(0.002)

    on_gpu = device.type == "cuda"
    before = torch.cuda.memory_allocated() if on_gpu else resident_bytes()
    watcher = threading.Thread(target=watch)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    else:
        watcher.start()
    start, start_busy = time.perf_counter(), time.process_time()
    total = compute(options, hidden, weight, labels)
    if on_gpu:
        torch.cuda.synchronize()
    seconds, busy = time.perf_counter() - start, time.process_time() - start_busy
    loss, checksum = total.item(), hidden.grad.double().norm().item()
    if not on_gpu:
        stop.set()
        watcher.join()
    most = torch.cuda.max_memory_allocated() if on_gpu else peak[0]
    return {"seconds": seconds, "busy_seconds": busy, "bytes": most - before, "loss": loss, "checksum": checksum}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=100_352)
    parser.add_argument("--chunk-tokens", type=int, default=1024)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of the CPU (default: all)")
    parser.add_argument("--implementation", choices=IMPLEMENTATIONS, help="measure one, print it as JSON")
    options = parser.parse_args()
    if options.implementation:
        print(json.dumps(measure(options)))
        return
    found: dict[str, list[dict[str, float]]] = {name: [] for name in IMPLEMENTATIONS}
    for repeat in range(options.repeats):
        for name in list(found)[:: 1 if repeat % 2 == 0 else -1]:
            command = [sys.executable, __file__, *sys.argv[1:], "--implementation", name]
            environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
            done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
            found[name].append(json.loads(done.stdout.strip().splitlines()[-1]))
    reference = found["textbook"][0]
    for name in ("plain", "chunked"):
        assert abs(found[name][0]["loss"] / reference["loss"] - 1) < 1e-6, "the two computed other losses"
        assert abs(found[name][0]["checksum"] / reference["checksum"] - 1) < 1e-5, "the two computed other gradients"
    logits = options.tokens * options.vocab * 4
    print(
        f"{options.tokens:,} tokens, width {options.width}, vocabulary {options.vocab:,}, {options.device}, float32;"
    )
    print(f"one set of logits is {logits / 2**20:,.0f} MiB; medians of {options.repeats}, ratios to the textbook's")
    medians = {
        name: {key: statistics.median(row[key] for row in rows) for key in ("seconds", "busy_seconds", "bytes")}
        for name, rows in found.items()
    }
    whole = medians["textbook"]
    for name, median in medians.items():
        print(
            f"{name:>8}: {median['bytes'] / 2**20:7,.0f} MiB ({median['bytes'] / whole['bytes']:.3f}), "
            f"{median['seconds']:6.2f} s ({median['seconds'] / whole['seconds']:.2f}), "
            f"{median['busy_seconds']:6.2f} s of processor ({median['busy_seconds'] / whole['busy_seconds']:.2f})"
        )


if __name__ == "__main__":
    main()
