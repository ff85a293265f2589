"""Tensor parallelism of transformers, by the plan in the configuration; two processes on the CPU."""

import subprocess
import sys

import pytest

from tests.model.tiny import tiny_model

SCRIPT = """
import torch
from transformers.distributed import DistributedConfig
from olmo_hf import OlmoHfForCausalLM

torch.set_num_threads(1)
ids = torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(1))
whole = OlmoHfForCausalLM.from_pretrained("model").eval()
split = OlmoHfForCausalLM.from_pretrained("model", distributed_config=DistributedConfig(tp_size=2)).eval()
assert split.model.layers[0].mlp.up_proj.weight.to_local().shape[0] == 32
logits = split(ids).logits
logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
torch.testing.assert_close(logits, whole(ids).logits, atol=1e-5, rtol=0)
print("equal")
"""


@pytest.mark.slow
def test_two_processes_give_the_logits_of_one(tmp_path):
    tiny_model(num_key_value_heads=2).save_pretrained(tmp_path / "model")
    (tmp_path / "script.py").write_text(SCRIPT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*launcher, "script.py"], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.stdout.count("equal") == 2, done.stderr
