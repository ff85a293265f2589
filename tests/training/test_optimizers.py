"""Update rules against recorded runs of the original and against torch; tolerance 1e-7 absolute on weights near 1."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import Olmo2Config, Olmo2ForCausalLM

from olmo_hf.training.args import TrainingArgs
from olmo_hf.training.clipping import AdaptiveClipper, gradient_norms
from olmo_hf.training.muon import MuonWithAdamW
from olmo_hf.training.optimizers import AdamWithUpdates, Lion, build_optimizer, describe_optimizer

GOLDEN = Path(__file__).parent.parent / "golden"
INDEX = json.loads((GOLDEN / "09_optimizers" / "index.json").read_text())


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


class Recorded:
    """The recorded model as bare parameters in two groups, its gradients and what became of it."""

    def __init__(self, name):
        self.settings = INDEX[name]["optimizer"]
        self.rates = INDEX[name]["lr_per_step"]
        self.result = np.load(GOLDEN / "09_optimizers" / f"{name}.npz")
        gradients = np.load(GOLDEN / "09_optimizers" / "gradients.npz")
        self.names = [str(name) for name in gradients["param_names"]]
        weights = load_file(GOLDEN / "09_optimizers" / "weights.safetensors")
        self.parameters = [nn.Parameter(weights[name]) for name in self.names]
        self.sizes = [parameter.numel() for parameter in self.parameters]
        self.gradients = torch.from_numpy(gradients[INDEX[name]["gradients"]])

    def groups(self):
        decay_norms, decay_embeddings = (self.settings[k] for k in ("decay_norm_and_bias", "decay_embeddings"))

        def decays(name):
            if "wte" in name:
                return decay_embeddings
            return decay_norms if "norm" in name or "ln_f" in name else True

        return [
            {
                "params": [p for n, p in zip(self.names, self.parameters, strict=True) if decays(n) is kind],
                "param_names": [n for n in self.names if decays(n) is kind],
                "weight_decay": self.settings["weight_decay"] if kind else 0.0,
            }
            for kind in (True, False)
            if any(decays(n) is kind for n in self.names)
        ]

    def run(self, optimizer, before_step=None):
        steps = []
        for step, rate in enumerate(self.rates):
            for parameter, gradient in zip(self.parameters, self.gradients[step].split(self.sizes), strict=True):
                parameter.grad = gradient.view_as(parameter).clone()
            for group in optimizer.param_groups:
                group["lr"] = rate
            if before_step is not None:
                before_step()
            optimizer.step()
            steps.append(flat(self.parameters).clone())
        return torch.stack(steps)

    def state(self, optimizer, key):
        return flat([optimizer.state[parameter][key] for parameter in self.parameters])


def adam_options(settings):
    return {"lr": settings["learning_rate"], "betas": tuple(settings["betas"]), "eps": settings["eps"]}


@pytest.mark.parametrize("name", ["adamw", "adamw_bigeps_nodecay_norm", "adamw_update_metrics", "adamw_selective"])
@pytest.mark.parametrize("recording", [False, True])
def test_recorded_adamw(name, recording):
    record = Recorded(name)
    optimizer = AdamWithUpdates(
        record.groups(),
        selective_updates=record.settings["selective_updates"],
        weight_decay=record.settings["weight_decay"],
        **adam_options(record.settings),
    )
    optimizer.record_next = recording  # the loop in Python is taken, or torch's own step
    found = record.run(optimizer)
    expected = torch.from_numpy(record.result["params_after_step"])
    assert (found - expected).abs().max() <= 1e-7 * expected.abs().max()
    for key in ("step", "exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(
            record.state(optimizer, key), torch.from_numpy(record.result[f"state/{key}"]), rtol=1e-6, atol=1e-9
        )


@pytest.mark.parametrize("name", ["lionw", "lionw_selective"])
def test_recorded_lion(name):
    record = Recorded(name)
    optimizer = Lion(
        record.groups(),
        lr=record.settings["learning_rate"],
        betas=tuple(record.settings["betas"]),
        weight_decay=record.settings["weight_decay"],
        selective_updates=record.settings["selective_updates"],
    )
    found = record.run(optimizer)
    expected = torch.from_numpy(record.result["params_after_step"])
    assert (found - expected).abs().max() <= 1e-7 * expected.abs().max()
    torch.testing.assert_close(
        record.state(optimizer, "exp_avg"), torch.from_numpy(record.result["state/exp_avg"]), rtol=1e-6, atol=1e-9
    )


def test_the_loop_equals_torch_and_its_counter_counts():
    # The bias correction must go on: 20 steps on a quadratic.
    def minimise(make):
        parameter = nn.Parameter(torch.linspace(-2, 2, 9))
        optimizer = make([{"params": [parameter], "param_names": ["w"]}], lr=0.1, betas=(0.9, 0.95), weight_decay=0.1)
        for _ in range(20):
            optimizer.zero_grad()
            (parameter - 0.3).square().sum().backward()
            optimizer.step()
        return parameter.detach(), optimizer.state[parameter]["step"].item()

    def recorded(*args, **kwargs):
        optimizer = AdamWithUpdates(*args, **kwargs)
        optimizer.record_next = True
        return optimizer

    expected, _ = minimise(torch.optim.AdamW)
    found, step = minimise(recorded)
    assert (found - expected).abs().max() <= 1e-7 * 2  # weights up to 2
    assert step == 20


def test_recorded_update_metrics():
    # The run with adaptive clipping is the one whose metrics after the step were recorded.
    folder = GOLDEN / "08_clipping"
    run = json.loads((folder / "index.json").read_text())["adaptive_update_metrics"]
    recorded = np.load(folder / "adaptive_update_metrics.metrics.npz")
    column = {str(name): i for i, name in enumerate(recorded["metric_names"])}
    gradients, weights = np.load(folder / "gradients.npz"), load_file(folder / "weights.safetensors")
    parameters = {name: nn.Parameter(weights[name]) for group in run["groups"] for name in group["param_names"]}
    groups = [
        {
            "params": [parameters[name] for name in group["param_names"]],
            "param_names": group["param_names"],
            "weight_decay": group["weight_decay"],
        }
        for group in run["groups"]
    ]
    optimizer = AdamWithUpdates(groups, **adam_options(run["optimizer"]))
    clipper = AdaptiveClipper(list(parameters), clip_groups="parameter", beta=0.95)
    tensors = list(parameters.values())
    for step in range(1, 13):
        for name, parameter in parameters.items():
            parameter.grad = torch.from_numpy(gradients[f"step{step:02d}/{name}"]).clone()
        clipper.clip(tensors, gradient_norms(tensors), ratio=run["max_grad_norm_ratio"], step=step)
        optimizer.record_next = True
        optimizer.step()
        metrics = optimizer.pop_update_metrics()
        for name, value in metrics.items():
            assert value.item() == pytest.approx(recorded["values"][step - 1][column[f"post/{name}"]], rel=2e-6), name
        assert len(metrics) == 2 * len(parameters)
    for name, parameter in parameters.items():
        expected = torch.from_numpy(np.load(folder / "adaptive_update_metrics.npz")[f"final/{name}"])
        assert (parameter - expected).abs().max() <= 1e-6


def test_nothing_is_recorded_unasked():
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    for optimizer in (AdamWithUpdates([{"params": [parameter], "param_names": ["w"]}]), Lion([parameter], lr=0.1)):
        optimizer.step()
        assert optimizer.pop_update_metrics() == {}


def test_cosine_of_lions_update():
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, -4.0]), torch.tensor([0.0])
    optimizer = Lion(parameters, lr=0.1)
    optimizer.record_next = True
    optimizer.step()
    # (3, -4, 0) against its signs (1, -1, 0), whatever the momentum's weight: 7 / (5 * sqrt(2)).
    assert optimizer.pop_update_metrics()["update_cos_sim"].item() == pytest.approx(7 / (5 * 2**0.5), rel=1e-6)


def test_small_updates_survive_in_float32_masters():
    # 100 updates of 1e-6: bfloat16 weights of 1.0 would stay where they are.
    parameter = nn.Parameter(torch.ones(1))
    optimizer = build_optimizer(Bare(parameter), TrainingArgs(learning_rate=1e-6, weight_decay=0.0))
    for _ in range(100):
        parameter.grad = torch.ones(1)
        optimizer.step()
    assert parameter.item() == pytest.approx(1 - 1e-4, abs=1e-5)


class Bare(nn.Module):
    """A module of one parameter."""

    def __init__(self, parameter):
        super().__init__()
        self.weight = parameter


def tiny_olmo2():
    torch.manual_seed(0)
    return Olmo2ForCausalLM(
        Olmo2Config(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=64,
            vocab_size=128,
        )
    )


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, torch.optim.AdamW),
        ({"optimizer": "lion"}, Lion),
        ({"optimizer": "muon"}, MuonWithAdamW),
        ({"selective_updates": True}, AdamWithUpdates),
        ({"record_update_metrics": True}, AdamWithUpdates),
    ],
)
def test_what_is_built(settings, expected):
    training = TrainingArgs(learning_rate=0.01, adam_beta1=0.8, adam_beta2=0.9, adam_epsilon=1e-6, **settings)
    model = tiny_olmo2()
    optimizer = build_optimizer(model, training)
    assert type(optimizer) is expected
    assert all(group["lr"] == 0.01 for group in optimizer.param_groups)
    adam = [group for group in optimizer.param_groups if "betas" in group]
    assert adam
    assert all(group["betas"] == (0.8, 0.9) for group in adam)
    held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(held) == sorted(id(parameter) for parameter in model.parameters())
    decays = {n: g["weight_decay"] for g in optimizer.param_groups for n in g["param_names"]}
    assert [name for name, decay in decays.items() if decay == 0.0] == ["model.embed_tokens.weight"]


def test_the_optimizer_is_described():
    rows = dict(describe_optimizer(tiny_olmo2(), TrainingArgs(optimizer="lion", learning_rate=1e-4)))
    assert rows["optimizer"] == "lion, peak learning rate 0.0001, betas (0.9, 0.95)"
    assert rows["group 1, weight decay 0.0"].endswith("model.embed_tokens.weight")


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"optim": "adafactor"}, "adafactor (Hugging Face's), peak learning rate 0.0004"),
        ({"optimizer": "muon"}, "muon, peak learning rate 0.0004, betas (0.9, 0.95)"),
    ],
)
def test_the_table_says_what_will_run(settings, rule):
    rows = dict(describe_optimizer(tiny_olmo2(), TrainingArgs(**settings)))
    assert rows["optimizer"] == rule
    listed = " ".join(value for label, value in rows.items() if label.startswith("group"))
    assert "model.layers.*.self_attn.q_proj.weight (x2)" in listed
    assert [label for label in rows if label.endswith(", muon")] == (
        ["group 0, weight decay 0.1, muon"] if "optimizer" in settings else []
    )


def train(model, optimizer, steps):
    tokens = torch.arange(32).view(2, 16) % 7
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_muon_is_torchs_on_hidden_matrices_and_adamw_elsewhere():
    training = TrainingArgs(optimizer="muon", learning_rate=0.01)
    model, twin = tiny_olmo2(), tiny_olmo2()
    optimizer = build_optimizer(model, training)
    of_muon = {n for g in optimizer.param_groups if g["use_muon"] for n in g["param_names"]}
    assert of_muon == {n for n, _ in twin.named_parameters() if "_proj" in n}
    named = dict(twin.named_parameters())
    muon = torch.optim.Muon(
        [named[n] for n in sorted(of_muon)], lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    rest = [parameter for name, parameter in named.items() if name not in of_muon and "embed" not in name]
    embedding = {"params": [named["model.embed_tokens.weight"]], "weight_decay": 0.0}
    adam = torch.optim.AdamW([{"params": rest}, embedding], lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    train(model, optimizer, 3)
    tokens = torch.arange(32).view(2, 16) % 7
    for _ in range(3):
        twin.zero_grad()
        twin(input_ids=tokens, labels=tokens).loss.backward()
        muon.step()
        adam.step()
    for (name, found), (_, expected) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        assert torch.equal(found, expected), name


@pytest.mark.parametrize("kind", ["adamw", "lion", "muon"])
def test_a_state_saved_and_loaded_continues_bitwise(kind, tmp_path):
    training = TrainingArgs(optimizer=kind, learning_rate=0.003)
    whole = tiny_olmo2()
    losses = train(whole, build_optimizer(whole, training), 6)
    first = tiny_olmo2()
    optimizer = build_optimizer(first, training)
    train(first, optimizer, 3)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    second = tiny_olmo2()
    second.load_state_dict(first.state_dict())
    resumed = build_optimizer(second, training)
    resumed.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    assert train(second, resumed, 3) == losses[3:]
    assert losses[-1] < losses[0]


def test_fused_and_looping_adamw_differ_in_roundings_only():
    """Weights of order 0.1 after ten updates of 0.01: a few roundings of each."""
    ends = []
    for fused in (True, False):
        model = tiny_olmo2()
        optimizer = build_optimizer(model, TrainingArgs(learning_rate=0.01, fused_adamw=fused))
        assert bool(optimizer.defaults["fused"]) is fused
        for step in range(10):
            generator = torch.Generator().manual_seed(step)
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step()
        ends.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    start = torch.cat([parameter.detach().flatten() for parameter in tiny_olmo2().parameters()])
    assert (ends[0] - start).abs().max() > 0.01
    assert (ends[0] - ends[1]).abs().max() <= 10 * torch.finfo(torch.float32).eps
