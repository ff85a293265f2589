"""`push_to_hub` and `from_pretrained` against a Hub on the loopback, in a process of its own."""

import os
import subprocess
import sys

import pytest
import torch

from olmo_hf.model.modeling_olmo import OlmoHfForCausalLM
from tests import hub_stub
from tests.model.test_generation import word_tokenizer
from tests.model.tiny import SHAPES, tiny_model, token_ids

SECRET = "hf_secret_of_the_test"

PUSH = """
from transformers import AutoTokenizer
from olmo_hf import OlmoHfForCausalLM
OlmoHfForCausalLM.from_pretrained("model").push_to_hub("someone/model")
AutoTokenizer.from_pretrained("model").push_to_hub("someone/model")
"""

PULL = """
import sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained("someone/model", trust_remote_code={trust}).eval()
assert not any(name.split(".")[0] == "olmo_hf" for name in sys.modules)
ids = torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(1))
torch.save(model(ids).logits.detach(), "logits.pt")
print(AutoTokenizer.from_pretrained("someone/model")("w5 w6").input_ids)
"""

# From the cache that the script before has filled.
START_FROM_IT = """
import torch
from olmo_hf import OlmoHfForCausalLM
from olmo_hf.model.args import ModelArgs
from olmo_hf.model.build import build_model, load_tokenizer
args = ModelArgs(init_from="someone/model", tokenizer="someone/model")
logits = torch.load("logits.pt", weights_only=True)
ids = torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(1))
for model in (build_model(args, seed=0), OlmoHfForCausalLM.from_pretrained("someone/model")):
    assert type(model) is OlmoHfForCausalLM
    assert torch.equal(model.eval()(ids).logits, logits)
print(load_tokenizer(args)("w5 w6").input_ids)
"""


@pytest.mark.parametrize("shape", ["olmo2_gqa", pytest.param("all_extras", marks=pytest.mark.slow)])
def test_round_trip(tmp_path, shape):
    model = tiny_model(**SHAPES[shape], tokenizer_vocab_size=100)
    model.save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    with hub_stub.running() as hub:
        environment = {
            **{name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"},
            "HF_ENDPOINT": hub.url,
            "HF_TOKEN": SECRET,
            "HF_HOME": str(tmp_path / "cache"),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1",
        }
        said = ""
        for script in (PUSH, PULL.format(trust=shape == "all_extras"), START_FROM_IT):
            command = [sys.executable, "-c", script]
            done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
            assert done.returncode == 0, done.stderr
            said += done.stdout + done.stderr
        assert hub.tokens == {SECRET}, "the test can notice a token: it was sent"
        assert SECRET not in said
        files = hub.repositories["someone/model"].files
        assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= files.keys()
        assert ("modeling_olmo.py" in files) == (shape == "all_extras")
        assert not any(SECRET.encode() in content for content in files.values())
    assert torch.equal(torch.load(tmp_path / "logits.pt", weights_only=True), model(token_ids(2, 16)).logits)
    assert done.stdout.strip().endswith("[5, 6]")
    assert isinstance(model, OlmoHfForCausalLM)
