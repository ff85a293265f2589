"""Importing the package teaches the Auto classes its model type, whatever is imported first."""

import subprocess
import sys

import pytest

from tests.model.tiny import SHAPES, tiny_model

FIRST = {
    "package": "import olmo_hf",
    "package then Auto classes": "import olmo_hf; from transformers import AutoConfig, AutoModelForCausalLM",
    "Auto classes then package": "from transformers import AutoConfig, AutoModelForCausalLM; import olmo_hf",
    "configuration file": "import olmo_hf.model.configuration_olmo",
    "public name": "from olmo_hf import OlmoHfConfig",
    "model file": "from olmo_hf.model.modeling_olmo import OlmoHfForCausalLM",
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("registration")
    tiny_model(**SHAPES["alibi"]).save_pretrained(folder / "own")
    tiny_model().save_pretrained(folder / "stock")
    return folder


def run(script, folder):
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=folder, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    "first",
    [FIRST["configuration file"], *(pytest.param(FIRST[k], marks=pytest.mark.slow) for k in FIRST if "file" not in k)],
)
def test_any_order(checkpoints, first):
    script = f"""
{first}
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
print(type(AutoConfig.from_pretrained("own")).__name__)
print(type(AutoModelForCausalLM.from_pretrained("own")).__name__, type(AutoModel.from_pretrained("own")).__name__)
print(type(AutoConfig.from_pretrained("stock")).__name__, type(AutoModelForCausalLM.from_pretrained("stock")).__name__)
"""
    expected = ["OlmoHfConfig", "OlmoHfForCausalLM", "OlmoHfModel", "Olmo2Config", "Olmo2ForCausalLM"]
    assert run(script, checkpoints) == expected


def test_taking_over_the_stock_types_on_demand(checkpoints):
    script = """
import olmo_hf
olmo_hf.register_auto_classes()
from transformers import AutoModel, AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("stock")
print(type(model).__name__, type(model).__module__, type(AutoModel.from_pretrained("stock")).__name__)
model.save_pretrained("again")
import json
print(json.load(open("again/config.json"))["model_type"])
"""
    expected = ["OlmoHfForCausalLM", "olmo_hf.model.modeling_olmo", "OlmoHfModel", "olmo2"]
    assert run(script, checkpoints) == expected
