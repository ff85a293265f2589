"""`OlmoTrainer` used by itself, as a Hugging Face user would: saving and going on without a YAML."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from olmo_hf.data.memmap import MemMapDataset
from olmo_hf.errors import CheckpointError, ConfigError
from olmo_hf.model.configuration_olmo import OlmoHfConfig
from olmo_hf.model.modeling_olmo import OlmoHfForCausalLM
from olmo_hf.training import commit
from olmo_hf.training.arguments import OlmoTrainingArguments
from olmo_hf.training.restarting import RestartingTrainer, move_on
from olmo_hf.training.trainer import OlmoTrainer


def trainer(directory: Path, *, identity: dict[str, Any] | None = None, **settings: Any) -> OlmoTrainer:
    """A tiny run of six steps over an epoch and a half."""
    np.random.default_rng(0).integers(0, 64, 8 * 18, dtype=np.uint16).tofile(directory / "tokens.npy")
    torch.manual_seed(0)
    config = OlmoHfConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    args = OlmoTrainingArguments(
        output_dir=str(directory / "run"),
        use_cpu=True,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        **{"max_steps": 6, "save_steps": 2, "learning_rate": 0.01, **settings},
    )
    dataset = MemMapDataset([str(directory / "tokens.npy")], sequence_length=8, token_dtype="uint16")
    return OlmoTrainer(OlmoHfForCausalLM(config), args, train_dataset=dataset, identity=identity)


def steps(directory: Path) -> list[int]:
    return [commit.step_of(path) for path in commit.list_checkpoints(directory / "run")]


def weights(run: RestartingTrainer) -> list[bytes]:
    return [parameter.detach().numpy().tobytes() for parameter in run.plain_model.parameters()]


def test_save_steps_and_save_total_limit_mean_what_they_say(tmp_path: Path) -> None:
    trainer(tmp_path, save_total_limit=2).train()
    assert steps(tmp_path) == [6, 4]
    trainer(tmp_path, save_total_limit=2, keep_unsharded=3, max_steps=8).train(resume_from_checkpoint=True)
    assert steps(tmp_path) == [8, 6, 4], "our own word is the stronger one"


def test_true_means_the_newest_that_is_whole(tmp_path: Path) -> None:
    whole = trainer(tmp_path)
    whole.train()
    (tmp_path / "run" / "checkpoint-6" / "model.safetensors").write_bytes(b"cut")
    again = trainer(tmp_path)
    again.train(resume_from_checkpoint=True)
    assert again.resumed_from is not None
    assert again.resumed_from.step == 4
    assert weights(again) == weights(whole)


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step)),
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5),
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10),
    ],
    ids=["lambda", "step", "cosine"],
)
def test_schedulers_of_torch_are_moved_on(make: Any) -> None:
    def fresh() -> Any:
        return make(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1))

    stepped, moved = fresh(), fresh()
    for _ in range(5):
        stepped.optimizer.step()
        stepped.step()
    move_on(moved, 5)
    for _ in range(3):
        assert moved.get_last_lr() == stepped.get_last_lr()
        moved.step()
        stepped.step()


def test_there_must_be_something_to_resume_from(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no whole checkpoint to resume from"):
        trainer(tmp_path).train(resume_from_checkpoint=True)


def test_another_identity_is_refused_with_the_difference(tmp_path: Path) -> None:
    trainer(tmp_path, identity={"data": {"seed": 1}}).train()
    with pytest.raises(ConfigError, match=r"data\.seed was 1 and is now 2"):
        trainer(tmp_path, identity={"data": {"seed": 2}}).train(resume_from_checkpoint=True)


@pytest.mark.parametrize(("settings", "kept"), [({"save_strategy": "no"}, []), ({"save_steps": 100}, [6])])
def test_no_means_no_and_otherwise_the_last_one_is_kept(
    tmp_path: Path, settings: dict[str, Any], kept: list[int]
) -> None:
    trainer(tmp_path, **settings).train()
    assert steps(tmp_path) == kept
