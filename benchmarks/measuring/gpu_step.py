"""Times training steps of one choice of model, attention, loss and compilation, for `benchmarks/gpu_check.py`.

python benchmarks/measuring/gpu_step.py '{"model": "ours", "size": "1b", "device": "cuda", ...}'

The fields are those of `Choice`. The loop is the same for every model: autocast to bfloat16 over float32 weights,
z-loss, clipping, fused AdamW. Printed is one JSON object: what was found, or why the choice cannot be had here.
"""

import contextlib
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from olmo_hf.callbacks.peak_flops import device_peak_flops  # noqa: E402
from olmo_hf.errors import OlmoHfError  # noqa: E402
from olmo_hf.model.build import choose_attn_implementation  # noqa: E402
from olmo_hf.model.configuration_olmo import OlmoHfConfig  # noqa: E402
from olmo_hf.model.modeling_olmo import OlmoHfForCausalLM  # noqa: E402
from olmo_hf.model.presets import preset_fields  # noqa: E402
from olmo_hf.model.size import flops_per_token  # noqa: E402
from olmo_hf.training.loss_in_model import loss_settings, model_loss_sums  # noqa: E402

Z_LOSS_WEIGHT, CHUNK_TOKENS = 1e-5, 1024
BIG_CARD_BYTES = 110e9


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What is timed."""

    model: str
    """`ours` or `transformers` in a bare loop, or `train_hf.py`."""
    size: str
    """A key of `SIZES`."""
    device: str
    attention: str = "auto"
    loss: str = "auto"
    compile: str = "no"
    """`no`, `model`: as a whole, `layers`: each layer by itself."""
    backend: str = "inductor"
    """Of torch.compile."""
    layers: list[int] = field(default_factory=list)
    """Numbers of layers to time one after another; empty: those of the size."""
    warm_steps: int = 3
    steps: int = 6


@dataclass(frozen=True)
class Found:
    """What was found for one number of layers."""

    seconds: float
    """Of a step, median."""
    peak_bytes: int
    """The most memory that was in use; on a CPU of the whole process."""
    tokens: int
    """Of a step."""
    flops_per_token: int
    peak_flops: float | None
    """Of the device."""


@dataclass(frozen=True)
class Size:
    """A model and the batch it is timed with."""

    fields: dict[str, Any]
    sequence_length: int
    rows: int
    """Instances of a step, on a card below `BIG_CARD_BYTES`; twice as many above."""


_TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 512,
    "eos_token_id": 0,
    "pad_token_id": 1,
}
SIZES = {
    "1b": Size(preset_fields("olmo2_1b"), 4096, 2),
    "7b": Size(preset_fields("olmo2_7b"), 4096, 1),
    "tiny": Size(_TINY, 64, 2),
}


def batch_rows(size: Size, device: str) -> int:
    big = device == "cuda" and torch.cuda.get_device_properties(0).total_memory > BIG_CARD_BYTES
    return size.rows * (2 if big else 1)


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def peak_bytes(device: str) -> int:
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def build(choice: Choice, fields: dict[str, Any]) -> Any:
    """The model on its device, in float32 and compiled if so chosen.

    Raises:
        ImportError, ValueError, OlmoHfError: the attention cannot be had here.
    """
    torch.manual_seed(0)
    config = OlmoHfConfig(**fields)
    attention = choose_attn_implementation(choice.attention, config, half_precision=True)
    with torch.device(choice.device):
        if choice.model == "ours":
            config._attn_implementation = attention
            model: Any = OlmoHfForCausalLM(config)
        else:
            from transformers import Olmo2Config, Olmo2ForCausalLM

            known = {k: v for k, v in config.to_init_dict().items() if k in Olmo2Config().to_dict()}
            stock = Olmo2Config(**known | {"attn_implementation": attention})
            model = Olmo2ForCausalLM(stock)
    model.to(choice.device).train()
    if choice.compile == "model":
        model.compile(backend=choice.backend)
    elif choice.compile == "layers":
        for layer in model.model.layers:
            layer.compile(backend=choice.backend)
    return model


def loss_of(choice: Choice, model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """From ids (B, S) to the mean loss: ours, or what one writes for a stock model."""
    if choice.model == "transformers":

        def written_out(ids: torch.Tensor) -> torch.Tensor:
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1).float()
            z = Z_LOSS_WEIGHT * logits.logsumexp(-1).square().mean()
            return F.cross_entropy(logits, ids[:, 1:].flatten()) + z

        return written_out
    settings = loss_settings(
        model,
        implementation=choice.loss,
        z_loss_weight=Z_LOSS_WEIGHT,
        chunk_tokens=CHUNK_TOKENS,
        keep_head=choice.compile == "model",
    )

    def ours(ids: torch.Tensor) -> torch.Tensor:
        terms, _ = model_loss_sums(model, {"input_ids": ids, "use_cache": False}, ids, settings)
        return terms.total / terms.num_labels

    return ours


def time_loop(choice: Choice, fields: dict[str, Any]) -> Found:
    """A bare loop, for any model."""
    size, device = SIZES[choice.size], choice.device
    model = build(choice, fields)
    loss_function = loss_of(choice, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    shape = (batch_rows(size, device), size.sequence_length)
    ids = torch.randint(2, fields["vocab_size"], shape, device=device)
    seconds = []
    for step in range(choice.warm_steps + choice.steps):
        if step == choice.warm_steps and device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        synchronise(device)
        began = time.perf_counter()
        with torch.autocast(device, torch.bfloat16):
            loss = loss_function(ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        synchronise(device)
        seconds.append(time.perf_counter() - began)
    if not bool(loss.isfinite()):
        raise ValueError(f"the loss is {loss.item()}")
    return found_of(choice, fields, seconds[choice.warm_steps :])


def found_of(choice: Choice, fields: dict[str, Any], seconds: list[float]) -> Found:
    size = SIZES[choice.size]
    return Found(
        seconds=statistics.median(seconds),
        peak_bytes=peak_bytes(choice.device),
        tokens=batch_rows(size, choice.device) * size.sequence_length,
        flops_per_token=flops_per_token(OlmoHfConfig(**fields), size.sequence_length).total,
        peak_flops=device_peak_flops(choice.device),
    )


class EnoughSteps(BaseException):
    """Ends a run without its last checkpoint, which is many gigabytes."""


def time_trainer(choice: Choice, fields: dict[str, Any]) -> Found:
    """`train_hf.py` itself, with default callbacks and every step logged."""
    from benchmarks.measuring.counting import observe_training

    size, rows = SIZES[choice.size], batch_rows(SIZES[choice.size], choice.device)
    steps, marks = choice.warm_steps + choice.steps, []

    def step_ended(step: int) -> None:
        synchronise(choice.device)
        marks.append(time.perf_counter())
        if step == choice.warm_steps and choice.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        if step == steps:
            raise EnoughSteps

    with tempfile.TemporaryDirectory() as folder:
        tokens = np.random.default_rng(0).integers(
            2, fields["vocab_size"], (steps + 2) * rows * size.sequence_length, np.uint32
        )
        tokens.tofile(f"{folder}/tokens.npy")
        path = Path(folder) / "run.yaml"
        path.write_text(json.dumps(run_settings(choice, fields, folder, rows, steps)))
        with contextlib.suppress(EnoughSteps):
            observe_training([str(path)], step_ended)
    gaps = [after - before for before, after in pairwise(marks)]
    return found_of(choice, fields, gaps[choice.warm_steps - 1 :])


def run_settings(choice: Choice, fields: dict[str, Any], folder: str, rows: int, steps: int) -> dict[str, Any]:
    """The run as nested sections (YAML reads JSON)."""
    size = SIZES[choice.size]
    compilation = {"torch_compile": True, "torch_compile_backend": choice.backend} if choice.compile != "no" else {}
    return {
        "name": "gpu-check",
        "model": {"config": fields, "attn_implementation": choice.attention},
        "data": {
            "paths": [f"{folder}/tokens.npy"],
            "token_dtype": "uint32",
            "sequence_length": size.sequence_length,
        },
        "training": {
            "output_dir": f"{folder}/run",
            "max_duration": steps + 1,
            "global_train_batch_size": rows,
            "per_device_train_batch_size": rows,
            "bf16": True,
            "use_cpu": choice.device == "cpu",
            "z_loss_weight": Z_LOSS_WEIGHT,
            "max_grad_norm": 1.0,
            "loss_implementation": choice.loss,
            "loss_chunk_tokens": CHUNK_TOKENS,
            "save_interval": None,
            "save_at_start": False,
            "resume": "never",
            **compilation,
        },
        "callbacks": {"speed_monitor": {}, "data_indices": {}, "console": {}},
    }


def run_choice(choice: Choice) -> dict[str, Any]:
    """`{"found": [one per number of layers]}`, or `{"skipped": why}`."""
    size = SIZES[choice.size]
    time_one = time_trainer if choice.model == "train_hf.py" else time_loop
    found = []
    try:
        for layers in choice.layers or [size.fields["num_hidden_layers"]]:
            found.append(vars(time_one(choice, size.fields | {"num_hidden_layers": layers})))
            if choice.device == "cuda":
                torch.cuda.empty_cache()
    except torch.OutOfMemoryError:
        return {"skipped": "out of memory"}
    except (ImportError, ValueError, OlmoHfError) as error:
        return {"skipped": " ".join(str(error).split())[:160]}
    return {"found": found}


if __name__ == "__main__":
    request = Choice(**json.loads(sys.argv[1]))
    if request.device == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
    sys.stdout.write("\nRESULT " + json.dumps(run_choice(request)) + "\n")
