"""The memory of a sharded step by torch's own tracker, on tensors without content and ranks that do not exist.

python tests/tracked_memory.py '{"fields": {...}, "step": {...}}'

The argument has the fields of `OlmoHfConfig` and of `StepSettings`; printed is the largest total in bytes, weights and
optimizer included. A process of its own, because the process group is a sham.
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: E402
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from olmo_hf.model.activation_checkpointing import apply_activation_checkpointing  # noqa: E402
from olmo_hf.model.configuration_olmo import OlmoHfConfig  # noqa: E402
from olmo_hf.model.modeling_olmo import OlmoHfForCausalLM  # noqa: E402
from olmo_hf.recipes.step_memory import _ATTENTION, StepSettings  # noqa: E402
from olmo_hf.training.loss_in_model import loss_settings, model_loss_sums  # noqa: E402


def sharded(config: OlmoHfConfig, step: StepSettings, mesh: DeviceMesh) -> OlmoHfForCausalLM:
    """The model, sharded as Accelerate does it."""
    model = OlmoHfForCausalLM(config).train()
    if step.activation_checkpointing is not None:
        apply_activation_checkpointing(model, step.activation_checkpointing)
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    options = {
        "mesh": mesh,
        "mp_policy": half if step.half else MixedPrecisionPolicy(),
        "reshard_after_forward": step.sharding == "full",
    }
    for layer in model.model.layers:
        fully_shard(layer, **options)
    fully_shard(model.model.embed_tokens, **options)
    fully_shard([model.model.norm, model.lm_head], **options | {"reshard_after_forward": False})
    fully_shard(model, **options)
    return model


def with_moments(model: OlmoHfForCausalLM) -> torch.optim.Optimizer:
    """AdamW after a step that nobody watches: an update of many tensors at once has temporaries of its own."""
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def main() -> int:
    given = json.loads(sys.argv[1])
    config, step = OlmoHfConfig(**given["fields"]), StepSettings(**given["step"])
    config._attn_implementation = _ATTENTION
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=step.shards)
    mesh = init_device_mesh("cpu", (step.shards,))
    with FakeTensorMode():
        model = sharded(config, step, mesh)
        optimizer = with_moments(model)
        ids = torch.zeros(step.micro_batch, step.sequence_length, dtype=torch.long)
        loss = loss_settings(
            model, implementation=step.loss_implementation, z_loss_weight=1e-5, chunk_tokens=step.loss_chunk_tokens
        )
        tracker = FSDPMemTracker(model, optimizer)
        tracker.track_inputs((ids,))
        with tracker:
            for _ in range(2 if step.accumulates else 1):
                with torch.autocast("cpu", torch.bfloat16, enabled=step.half):
                    terms, outputs = model_loss_sums(model, {"input_ids": ids, "use_cache": False}, ids, loss)
                total = terms.total
                del terms, outputs
                total.backward()
                tracker.reset_mod_stats()
    print(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
