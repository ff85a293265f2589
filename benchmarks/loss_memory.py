"""Peak memory and time of the plain and the chunked loss, forward and backward, at a large vocabulary.

python benchmarks/loss_memory.py [--tokens 4096] [--width 512] [--vocab 100352] [--device cuda]

Both start from the same hidden states and head weight. Memory is the most held at one time beyond these two and what
they need for their gradients; every measurement is a process of its own.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def measure(options: argparse.Namespace) -> dict[str, float]:
    """One implementation, in this process."""
    import threading
    import time

    import torch

    from olmo_hf.training.loss import causal_lm_loss_sums
    from olmo_hf.training.loss_chunked import chunked_causal_lm_loss_sums

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
    start = time.perf_counter()
    if options.implementation == "plain":
        terms = causal_lm_loss_sums(torch.nn.functional.linear(hidden, weight), labels, z_loss_weight=1e-5)
    else:
        terms = chunked_causal_lm_loss_sums(
            hidden, weight, labels, chunk_tokens=options.chunk_tokens, z_loss_weight=1e-5
        )
    terms.total.backward()
    loss, checksum = terms.total.item(), hidden.grad.double().norm().item()
    seconds = time.perf_counter() - start
    if not on_gpu:
        stop.set()
        watcher.join()
    most = torch.cuda.max_memory_allocated() if on_gpu else peak[0]
    return {"seconds": seconds, "bytes": most - before, "loss": loss, "checksum": checksum}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=100_352)
    parser.add_argument("--chunk-tokens", type=int, default=1024)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--implementation", choices=["plain", "chunked"], help="measure one, print it as JSON")
    options = parser.parse_args()
    if options.implementation:
        print(json.dumps(measure(options)))
        return
    found: dict[str, list[dict[str, float]]] = {"plain": [], "chunked": []}
    for repeat in range(options.repeats):
        for name in list(found)[:: 1 if repeat % 2 == 0 else -1]:
            command = [sys.executable, __file__, *sys.argv[1:], "--implementation", name]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found[name].append(json.loads(done.stdout.strip().splitlines()[-1]))
    one, other = found["plain"][0], found["chunked"][0]
    assert abs(one["loss"] / other["loss"] - 1) < 1e-6, "the two computed other losses"
    assert abs(one["checksum"] / other["checksum"] - 1) < 1e-5, "the two computed other gradients"
    logits = options.tokens * options.vocab * 4
    print(
        f"{options.tokens:,} tokens, width {options.width}, vocabulary {options.vocab:,}, {options.device}, float32;"
    )
    print(f"one set of logits is {logits / 2**20:,.0f} MiB; best of {options.repeats}")
    for name, rows in found.items():
        seconds, size = min(row["seconds"] for row in rows), min(row["bytes"] for row in rows)
        print(f"{name:>8}: {size / 2**20:,.0f} MiB, {seconds:.2f} s")


if __name__ == "__main__":
    main()
