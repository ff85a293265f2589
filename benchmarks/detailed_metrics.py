"""What the detailed metrics (`training.optimizer_metrics_steps`) cost: time of a step without them and with them.

python benchmarks/detailed_metrics.py [CONFIG.yaml] [--steps 20] [--interval 10] [--repeats 3]

By default on the architecture and batch of configs/tiny/cpu.yaml, on random tokens. Both trainers take turns in one
process; a step is timed from its first callback to its log line. Printed is the share by which the median round of
steps is longer.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
from transformers import TrainerCallback  # noqa: E402

from olmo_hf.config_file import load_run  # noqa: E402
from olmo_hf.data.memmap import MemMapDataset  # noqa: E402
from olmo_hf.model.build import build_model  # noqa: E402
from olmo_hf.training.arguments import OlmoTrainingArguments  # noqa: E402
from olmo_hf.training.trainer import OlmoTrainer  # noqa: E402


class Seconds(TrainerCallback):
    """Time of every step."""

    def __init__(self) -> None:
        self.of_step: list[float] = []
        self._start = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._start = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if len(self.of_step) == state.global_step - 1:
            self.of_step.append(time.perf_counter() - self._start)


def seconds_of(run: Any, dataset: MemMapDataset, *, steps: int, interval: int | None, folder: str) -> list[float]:
    """Time of every step of a short run."""
    clock = Seconds()
    args = OlmoTrainingArguments(
        output_dir=folder,
        use_cpu=True,
        max_steps=steps,
        per_device_train_batch_size=run.training.per_device_train_batch_size,
        gradient_accumulation_steps=max(
            run.training.global_train_batch_size // run.training.per_device_train_batch_size, 1
        ),
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        optimizer_metrics_steps=interval,
    )
    model = build_model(run.model, seed=0)
    OlmoTrainer(model, args, train_dataset=dataset, callbacks=[clock]).train()
    return clock.of_step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", default=str(ROOT / "configs" / "tiny" / "cpu.yaml"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--interval", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    run = load_run(Path(options.config), [])
    found: dict[int | None, list[float]] = {None: [], options.interval: []}
    with tempfile.TemporaryDirectory() as folder:
        length = run.data.sequence_length
        size = (options.steps + 1) * run.training.global_train_batch_size * length
        path = Path(folder) / "tokens.npy"
        np.random.default_rng(0).integers(0, 512, size, dtype=np.uint16).tofile(path)
        dataset = MemMapDataset([path], sequence_length=length, token_dtype="uint16")
        for repeat in range(options.repeats):
            for interval in list(found)[:: 1 if repeat % 2 == 0 else -1]:
                seconds = seconds_of(run, dataset, steps=options.steps, interval=interval, folder=f"{folder}/run")
                rounds = [
                    seconds[i : i + options.interval] for i in range(options.interval, len(seconds), options.interval)
                ]
                found[interval] += [sum(part) / len(part) for part in rounds]
    without, with_details = (statistics.median(rounds) for rounds in found.values())
    print(f"without {without * 1e3:.1f} ms a step, every {options.interval} steps {with_details * 1e3:.1f} ms")
    print(f"cost {100 * (with_details / without - 1):+.2f} % of a step (target: under 2 %)")


if __name__ == "__main__":
    main()
