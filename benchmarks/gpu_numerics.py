"""Every attention path of one GPU against float32 on the same inputs: dense, packed, padded and with a cache.

python benchmarks/gpu_numerics.py [--output numerics.json] [--device cuda]

For each architecture, path and precision the logits and the gradient of a small model are compared with those of
written-out attention in fp32 (TF32 off) with the same, already rounded, weights. Packed rows are compared with their
documents run alone. A path may be off by twice what written-out attention is off by in the same precision; in fp32 by
2e-5. What is not installed is named and not counted. Exit status 1 if anything is too far off. It takes about a minute
and a half, most of it for compiling flex attention. On `--device cpu` sdpa runs through the same comparison.
"""

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from olmo_hf.model.configuration_olmo import OlmoHfConfig
from olmo_hf.model.modeling_olmo import OlmoHfForCausalLM

PATHS = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3")
PRECISIONS = ("fp32", "bf16", "fp16", "bf16 autocast")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SIZE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "vocab_size": 1024,
    "max_position_embeddings": 512,
    "initializer_range": 0.05,  # large enough that a wrong mask shows in the logits
}
SHAPES: dict[str, dict[str, Any]] = {
    "heads of 64, grouped": {"num_key_value_heads": 2},
    "heads of 128": {"num_attention_heads": 4},
    "alibi": {"position_embedding": "alibi"},
    "positions restart": {"num_key_value_heads": 2, "reset_document_positions": True},
}
ROWS, LENGTH, CACHED = 3, 512, 500
DOCUMENTS = ((200, 1, 311, 0, 0), (512, 0, 0, 0, 0), (64, 100, 63, 129, 156))
PADDING = (0, 37, 300)
FP32_ALLOWED = 2e-5
LOSS_SCALE = 1024.0  # keeps fp16 gradients above its smallest numbers

Result = dict[str, float]
"""`logits`: largest |difference| over the largest |logit|; `gradient`: norm of the difference over the norm."""


@dataclass(frozen=True)
class Row:
    """One comparison."""

    shape: str
    path: str
    precision: str
    case: str
    logits: float
    gradient: float | None
    allowed_logits: float
    allowed_gradient: float | None
    passed: bool


@dataclass(frozen=True)
class Inputs:
    """What every path is given."""

    ids: torch.Tensor  # (B, S)
    documents: torch.Tensor  # (B, N)
    padding_mask: torch.Tensor  # (B, S)

    @classmethod
    def make(cls, device: str) -> "Inputs":
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(0, SIZE["vocab_size"], (ROWS, LENGTH), generator=generator)
        mask = torch.stack([(torch.arange(LENGTH) >= padding).long() for padding in PADDING])
        return cls(ids.to(device), torch.tensor(DOCUMENTS, device=device), mask.to(device))


def with_gradient(model: OlmoHfForCausalLM, logits: torch.Tensor, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Logits and the gradient of their cross-entropy as one vector."""
    model.zero_grad()
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
    (loss * LOSS_SCALE).backward()
    gradient = torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])
    return {"logits": logits.detach().float(), "gradient": gradient / LOSS_SCALE}


def dense(model: OlmoHfForCausalLM, x: Inputs) -> dict[str, torch.Tensor]:
    return with_gradient(model, model(x.ids, use_cache=False).logits, x.ids)


def packed(model: OlmoHfForCausalLM, x: Inputs) -> dict[str, torch.Tensor]:
    return with_gradient(model, model(x.ids, doc_lens=x.documents).logits, x.ids)


def packed_lengths_known(model: OlmoHfForCausalLM, x: Inputs) -> dict[str, torch.Tensor]:
    longest = [max(lengths) for lengths in DOCUMENTS]
    return with_gradient(model, model(x.ids, doc_lens=x.documents, max_doc_lens=longest).logits, x.ids)


def alone(model: OlmoHfForCausalLM, x: Inputs) -> dict[str, torch.Tensor]:
    """What packed rows must equal: every document by itself."""
    rows = []
    for row, lengths in zip(x.ids, DOCUMENTS, strict=True):
        parts = row.split([n for n in lengths if n > 0])
        rows.append(torch.cat([model(part[None], use_cache=False).logits[0] for part in parts]))
    return with_gradient(model, torch.stack(rows), x.ids)


@torch.no_grad()
def left_padded(model: OlmoHfForCausalLM, x: Inputs) -> dict[str, torch.Tensor]:
    logits = model(x.ids, attention_mask=x.padding_mask, use_cache=False).logits
    return {"logits": logits[x.padding_mask == 1].float()}


@torch.no_grad()
def without_padding(model: OlmoHfForCausalLM, x: Inputs) -> dict[str, torch.Tensor]:
    """What a left-padded batch must equal: every row by itself, from its first token."""
    rows = [model(row[None, n:], use_cache=False).logits[0] for row, n in zip(x.ids, PADDING, strict=True)]
    return {"logits": torch.cat(rows).float()}


@torch.no_grad()
def cached(model: OlmoHfForCausalLM, x: Inputs) -> dict[str, torch.Tensor]:
    """Most of the row at once, the rest token by token from the cache."""
    out = model(x.ids[:, :CACHED], use_cache=True)
    logits = [out.logits]
    for place in range(CACHED, LENGTH):
        out = model(x.ids[:, place : place + 1], past_key_values=out.past_key_values, use_cache=True)
        logits.append(out.logits)
    return {"logits": torch.cat(logits, dim=1).float()}


@torch.no_grad()
def without_cache(model: OlmoHfForCausalLM, x: Inputs) -> dict[str, torch.Tensor]:
    return {"logits": model(x.ids, use_cache=False).logits.float()}


def compiled(model: OlmoHfForCausalLM, x: Inputs) -> dict[str, torch.Tensor]:
    torch._dynamo.reset()
    return with_gradient(model, torch.compile(model)(x.ids, use_cache=False).logits, x.ids)


Case = Callable[[OlmoHfForCausalLM, Inputs], dict[str, torch.Tensor]]
CASES: dict[str, tuple[Case, Case]] = {
    "dense": (dense, dense),
    "packed": (packed, alone),
    "packed, longest known": (packed_lengths_known, alone),
    "left padding": (left_padded, without_padding),
    "cache": (cached, without_cache),
}
COMPILED_CASE: dict[str, tuple[Case, Case]] = {"torch.compile": (compiled, dense)}


def error_of(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> Result:
    logits, wanted = found["logits"], expected["logits"]
    result = {"logits": ((logits - wanted).abs().max() / wanted.abs().max()).item()}
    if "gradient" in found:
        difference = found["gradient"] - expected["gradient"]
        result["gradient"] = (difference.norm() / expected["gradient"].norm()).item()
    return result


def use(model: OlmoHfForCausalLM, path: str) -> str | None:
    """Switch to an attention path; returns why it cannot be used here."""
    try:
        model.set_attn_implementation(path)
    except (ImportError, ValueError, OSError) as error:
        return str(error).strip().splitlines()[0][:150]
    return None


def measure(model: OlmoHfForCausalLM, case: Case, x: Inputs, precision: str) -> dict[str, torch.Tensor]:
    autocast = torch.autocast(x.ids.device.type, torch.bfloat16) if "autocast" in precision else nullcontext()
    with autocast:
        return case(model, x)


def compare(
    shape: str, precision: str, x: Inputs, unusable: dict[str, str], paths: tuple[str, ...] = PATHS
) -> list[Row]:
    """All cases of all paths for one architecture in one precision; `unusable` collects paths that are not here."""
    torch.manual_seed(0)
    reference: Any = OlmoHfForCausalLM(OlmoHfConfig(**(SIZE | SHAPES[shape]))).eval()
    reference.to(DTYPES.get(precision, torch.float32)).to(device=x.ids.device, dtype=torch.float32)
    # A configuration of its own: the attention path is written there.
    model: Any = OlmoHfForCausalLM(copy.deepcopy(reference.config)).eval()
    model.load_state_dict(reference.state_dict())
    model.to(device=x.ids.device, dtype=DTYPES.get(precision, torch.float32))
    assert use(reference, "eager") is None
    rows: list[Row] = []
    spread: dict[str, Result] = {}
    for path in paths:
        is_flash = path.startswith("flash")
        if path in unusable or (is_flash and (precision == "fp32" or shape == "alibi")):
            continue
        if (reason := use(model, path)) is not None:
            unusable[path] = reason
            continue
        cases = dict(CASES)
        if x.ids.is_cuda and precision == "bf16 autocast" and shape == "heads of 128" and path != "eager":
            cases |= COMPILED_CASE
        for name, (case, expected_from) in cases.items():
            expected = expected_from(reference, x)
            assert (reference.config._attn_implementation, model.config._attn_implementation) == ("eager", path)
            found = error_of(measure(model, case, x, precision), expected)
            if path == "eager":
                spread[name] = found
            rows.append(judge((shape, path, precision, name), found, spread[name if name in spread else "dense"]))
    return rows


def judge(where: tuple[str, str, str, str], found: Result, spread: Result) -> Row:
    def allowed(kind: str) -> float:
        return FP32_ALLOWED if where[2] == "fp32" else 2 * spread[kind]

    passed = all(value <= allowed(kind) for kind, value in found.items())  # false for NaN
    gradient = found.get("gradient")
    return Row(
        *where,
        logits=found["logits"],
        gradient=gradient,
        allowed_logits=allowed("logits"),
        allowed_gradient=None if gradient is None else allowed("gradient"),
        passed=passed,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path, help="where to write the figures as JSON")
    parser.add_argument("--shapes", nargs="+", choices=tuple(SHAPES), default=tuple(SHAPES))
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    options = parser.parse_args()
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        raise SystemExit("no CUDA device here; --device cpu tries the comparison itself")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    unusable: dict[str, str] = {}
    if options.device == "cpu":
        unusable["flex_attention"] = "has no backward pass on CPUs"
    start, rows, inputs = time.perf_counter(), [], Inputs.make(options.device)
    for shape in options.shapes:
        for precision in options.precisions:
            for row in compare(shape, precision, inputs, unusable):
                rows.append(row)
                gradient = "" if row.gradient is None else f"{row.gradient:.1e} / {row.allowed_gradient:.1e}"
                verdict = "ok" if row.passed else "TOO FAR"
                print(
                    f"{row.shape:<21}{row.path:<18}{row.precision:<14}{row.case:<22}"
                    f"{row.logits:.1e} / {row.allowed_logits:.1e}   {gradient:<18}  {verdict}",
                    flush=True,
                )
    name = torch.cuda.get_device_name() if options.device.startswith("cuda") else "CPU"
    failed = sum(not row.passed for row in rows)
    for path, reason in unusable.items():
        print(f"not here: {path} ({reason})")
    seconds = time.perf_counter() - start
    print(f"{name}, torch {torch.__version__}: {len(rows) - failed} of {len(rows)} hold, {seconds:.0f} s")
    if options.output is not None:
        content = {"device": name, "torch": torch.__version__, "unusable": unusable, "rows": [asdict(r) for r in rows]}
        options.output.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
