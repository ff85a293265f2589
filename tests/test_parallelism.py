"""Why tensor and context parallel are refused: Accelerate and transformers themselves, without anything of ours.

These tests fail when other versions can do more; then `NOT_SUPPORTED` in olmo_hf/distributed.py is to be looked at.
"""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import transformers.integrations.tensor_parallel
from accelerate import Accelerator

from tests import runs
from tests.invariants.test_split import FSDP

SCRIPT = """
import sys, torch, torch.distributed as dist
from olmo_hf.distributed import enable_fsdp_on_cpu
enable_fsdp_on_cpu()  # without it Accelerate drops FSDP on a CPU
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from torch.distributed.tensor import DTensor
from transformers import Olmo2Config, Olmo2ForCausalLM
from transformers.distributed import DistributedConfig

kind, folder = sys.argv[1:]
config = Olmo2Config(vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    Olmo2ForCausalLM(config).save_pretrained(folder)
dist.barrier()
sizes = {"cp_size": 2} if kind == "context" else {"dp_shard_size": 2, "tp_size": 2}
accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**sizes))
split = {"distributed_config": DistributedConfig(tp_size=2, fsdp_size=2)} if kind == "split" else {}
model = Olmo2ForCausalLM.from_pretrained(folder, attn_implementation="sdpa", **split)
ids = torch.zeros(2, 16, dtype=torch.long)
places = torch.arange(16).expand(2, -1).contiguous()
try:
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    if kind == "context":
        with accelerator.maybe_context_parallel(buffers=[ids, places], buffer_seq_dims=[1, 1]):
            model(input_ids=ids, position_ids=places)
    dims = {name for p in model.parameters() if isinstance(p, DTensor) for name in p.device_mesh.mesh_dim_names}
    print(f"meshes of weights: {sorted(dims)}")
except (ImportError, NotImplementedError) as error:
    print(f"{type(error).__name__}: {error}")
"""


def tell(directory: Path, kind: str, processes: int) -> str:
    """What the processes print."""
    (directory / "script.py").write_text(SCRIPT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    done = subprocess.run(
        [*launcher, "script.py", kind, str(directory / "model")],
        cwd=directory,
        env=runs.environment(**FSDP | {"FSDP_TRANSFORMER_CLS_TO_WRAP": "Olmo2DecoderLayer"}),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_accelerate_asks_for_what_transformers_lacks() -> None:
    assert "import ReplicateParallel" in inspect.getsource(Accelerator._prepare_tp)
    assert not hasattr(transformers.integrations.tensor_parallel, "ReplicateParallel")


@pytest.mark.slow
def test_fsdp_with_tensor_parallel_ends_in_an_import_error(tmp_path: Path) -> None:
    assert "ImportError: cannot import name 'ReplicateParallel'" in tell(tmp_path, "split", 4)


@pytest.mark.slow
def test_a_model_that_is_not_split_trains_in_copies(tmp_path: Path) -> None:
    found = tell(tmp_path, "whole", 4)
    assert "meshes of weights: ['dp_shard_cp']" in found


@pytest.mark.slow
def test_context_parallel_knows_no_attention_on_a_cpu(tmp_path: Path) -> None:
    assert "NotImplementedError: Operator aten._scaled_dot_product_flash" in tell(tmp_path, "context", 2)
