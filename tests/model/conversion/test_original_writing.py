"""What the original finds in a checkpoint that was written for it."""

import base64
import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from olmo_hf.cli.main import main
from olmo_hf.errors import ConversionError
from olmo_hf.model.conversion.lazy import from_memory
from olmo_hf.model.conversion.original_writing import original_groups, refuse_foreign_state
from olmo_hf.model.conversion.tensor_names import tensor_table
from olmo_hf.training.parameter_groups import parameter_groups
from tests.model.tiny import tiny_config, tiny_model

CHECKPOINTS = Path(__file__).parents[2] / "golden" / "11_checkpoints"
GOLDEN = CHECKPOINTS / "unsharded_from_fsdp"  # names as in the published runs


def run(*words: object) -> int:
    return main(["convert", *map(str, words)])


def groups_of_run(model, **flags):
    groups = parameter_groups(model, weight_decay=0.1, **flags)
    return [{k: v for k, v in group.items() if k != "params"} | {"lr": 3e-4, "betas": [0.8, 0.9]} for group in groups]


@pytest.fixture(scope="module")
def there_and_back(tmp_path_factory):
    """The golden checkpoint, converted to ours and from there to the original again, in both formats."""
    folder = tmp_path_factory.mktemp("there_and_back")
    assert run(GOLDEN, folder / "ours") == 0
    for kind in ("pt", "safetensors"):
        assert run(folder / "ours", folder / kind, "--original-format", kind) == 0
    return folder


def test_trainer_state(there_and_back):
    expected = torch.load(GOLDEN / "train.pt", weights_only=False)
    for kind in ("pt", "safetensors"):
        found = torch.load(there_and_back / kind / "train.pt", weights_only=True)
        # Random states are not carried, and without them their world size says nothing.
        assert found.keys() == expected.keys() - {"rng", "world_size"}
        assert found == {key: expected[key] for key in found}
        assert found["global_step"] == 30


def test_groups_are_those_that_the_original_made(there_and_back):
    expected = torch.load(GOLDEN / "optim.pt", weights_only=False)["param_groups"]
    found = torch.load(there_and_back / "pt" / "optim.pt", weights_only=True)["param_groups"]
    assert len(found) == len(expected) == 2
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["params"] == ours["param_names"] == theirs["params"]
        for key in ("weight_decay", "betas", "eps", "sharded", "amsgrad", "maximize", "foreach", "fused"):
            assert ours[key] == theirs[key], key
        # "decoupled_weight_decay" is torch's own mark; torch adds what a loaded group lacks.
        assert theirs.keys() - ours.keys() <= {"decoupled_weight_decay"}


def test_torch_takes_the_optimizer_state(there_and_back):
    """An AdamW built as the original builds it loads the groups and the state."""
    state = torch.load(there_and_back / "pt" / "optim.pt", weights_only=True)
    weights = torch.load(there_and_back / "pt" / "model.pt", weights_only=True)
    parameters = [[torch.nn.Parameter(weights[name]) for name in group["params"]] for group in state["param_groups"]]
    optimizer = torch.optim.AdamW([{"params": group, "sharded": True} for group in parameters])
    numbers = {name: n for n, name in enumerate(n for group in state["param_groups"] for n in group["params"])}
    by_number = {
        "state": {numbers[name]: values for name, values in state["state"].items()},
        "param_groups": [g | {"params": [numbers[n] for n in g["params"]]} for g in state["param_groups"]],
    }
    optimizer.load_state_dict(by_number)
    for group in parameters:
        for parameter in group:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert {float(values["step"]) for values in optimizer.state.values()} == {4.0}, "three steps went before"


def test_encoded_safetensors_hold_state_and_groups(there_and_back):
    plain = torch.load(there_and_back / "pt" / "optim.pt", weights_only=True)
    rebuilt: dict = {}
    for key, tensor in load_file(there_and_back / "safetensors" / "optim.safetensors").items():
        path, is_pickled = pickle.loads(base64.urlsafe_b64decode(key))
        inner = rebuilt
        for part in path[:-1]:
            inner = inner.setdefault(part, {})
        inner[path[-1]] = pickle.loads(tensor.numpy().tobytes()) if is_pickled else tensor
    assert rebuilt["param_groups"] == plain["param_groups"]
    assert rebuilt["state"].keys() == plain["state"].keys()
    for name, values in plain["state"].items():
        assert all(torch.equal(rebuilt["state"][name][key], value) for key, value in values.items())
    assert run(there_and_back / "safetensors", there_and_back / "again") == 0
    expected, found = (load_file(there_and_back / n / "optimizer.safetensors") for n in ("ours", "again"))
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("decay_norm_and_bias", [True, False])
@pytest.mark.parametrize("decay_embeddings", [True, False])
def test_groups_of_a_run_of_ours(decay_norm_and_bias, decay_embeddings):
    model = tiny_model(attention_bias=True)
    entries = tensor_table(model.config)
    ours = groups_of_run(model, decay_norm_and_bias=decay_norm_and_bias, decay_embeddings=decay_embeddings)
    groups = original_groups(ours, entries)
    assert [group["weight_decay"] for group in groups] == [group["weight_decay"] for group in ours]
    assert sorted(n for group in groups for n in group["params"]) == sorted(entry.original for entry in entries)
    decaying = set(groups[0]["params"])
    assert ("transformer.wte.weight" in decaying) == decay_embeddings
    assert ("transformer.blocks.1.q_norm.weight" in decaying) == decay_norm_and_bias
    assert ("transformer.blocks.1.att_proj.bias" in decaying) == decay_norm_and_bias
    assert "transformer.blocks.0.att_proj.weight" in decaying
    assert all(group["betas"] == (0.8, 0.9) and group["lr"] == 3e-4 for group in groups)


def test_groups_that_split_a_tensor_of_the_original_are_refused():
    model = tiny_model()
    groups = groups_of_run(model, decay_norm_and_bias=True, decay_embeddings=False)
    name = "model.layers.0.self_attn.k_proj.weight"
    groups[0]["param_names"].remove(name)
    with pytest.raises(ConversionError, match=r"att_proj\.weight: .*k_proj\.weight.* not in one parameter group"):
        original_groups(groups, tensor_table(tiny_config()))
    groups[1]["param_names"].append(name)
    with pytest.raises(ConversionError, match="--no-optimizer"):
        original_groups(groups, tensor_table(tiny_config()))


def test_state_that_the_original_does_not_keep_is_refused_by_name(there_and_back, tmp_path, capsys):
    refuse_foreign_state(from_memory({"w.step": torch.tensor(1.0), "w.exp_avg": torch.zeros(2)}))
    source = tmp_path / "muon"
    shutil.copytree(there_and_back / "ours", source)
    state = load_file(source / "optimizer.safetensors")
    renamed = {name.replace(".exp_avg_sq", ".momentum_buffer"): tensor for name, tensor in state.items()}
    save_file(renamed, source / "optimizer.safetensors")
    assert run(source, tmp_path / "out") == 2
    assert "keep no momentum_buffer" in capsys.readouterr().err
    assert run(source, tmp_path / "out", "--no-optimizer") == 0
    assert not (tmp_path / "out" / "optim.pt").exists()


def test_what_is_missing_is_said(there_and_back, tmp_path, capsys):
    capsys.readouterr()
    assert run(there_and_back / "ours", tmp_path / "a") == 0
    said = capsys.readouterr().out
    assert "no optimizer.json" in said
    assert "train.pt" not in said
    source = tmp_path / "run"
    shutil.copytree(there_and_back / "ours", source)
    config = tiny_config()  # only its groups' names matter below
    assert config.num_hidden_layers == 2
    names = [n.removeprefix("optimizer.") for n in load_file(source / "optimizer.safetensors")]
    parameters = sorted({n.rsplit(".", 1)[0] for n in names})
    (source / "optimizer.json").write_text(json.dumps({"groups": [{"param_names": parameters, "weight_decay": 0.2}]}))
    assert run(source, tmp_path / "b") == 0
    assert "optimizer.json" not in capsys.readouterr().out
    (group,) = torch.load(tmp_path / "b" / "optim.pt", weights_only=True)["param_groups"]
    assert group["weight_decay"] == 0.2
    (source / "run_state.json").unlink()
    assert run(source, tmp_path / "c") == 0
    assert "there is no train.pt" in capsys.readouterr().out
    assert not (tmp_path / "c" / "train.pt").exists()
