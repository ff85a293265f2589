"""What a run is, as far as a restart must know, and what a restart does not repeat."""

from pathlib import Path

import numpy as np

from olmo_hf.data.memmap import MemMapDataset
from olmo_hf.data.mixing import MixedDataset, MixedSource
from olmo_hf.data.order import DataPosition, OrderedDataset
from olmo_hf.model.configuration_olmo import OlmoHfConfig
from olmo_hf.model.modeling_olmo import OlmoHfForCausalLM
from olmo_hf.training.args import TrainingArgs
from olmo_hf.training.build import run_identity, without_resets
from olmo_hf.training.state import compare_identity


def identity(directory: Path, taken: int | None) -> dict:
    """Of a tiny run, with a mix that takes so many of its ten instances."""
    np.zeros(40, np.uint16).tofile(directory / "tokens.npy")
    dataset = MemMapDataset([str(directory / "tokens.npy")], sequence_length=4, token_dtype="uint16")
    mixed = MixedDataset(dataset, [MixedSource("books", 10, taken)], seed=1) if taken is not None else dataset
    order = OrderedDataset(mixed, seed=1, shuffle=True, global_batch_size=2, start=DataPosition())
    config = OlmoHfConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    return run_identity(OlmoHfForCausalLM(config), order)


def test_another_mix_is_another_run(tmp_path: Path) -> None:
    assert compare_identity(identity(tmp_path, 8), identity(tmp_path, 8)) == []
    differences = compare_identity(identity(tmp_path, 8), identity(tmp_path, 6))
    assert "data.mix.books was 8 and is now 6" in differences
    assert any("data.mix" in line for line in compare_identity(identity(tmp_path, None), identity(tmp_path, 10)))


def test_a_restart_repeats_no_reset() -> None:
    first = TrainingArgs(
        reset_optimizer=True,
        reset_trainer_state=True,
        restore_dataloader=False,
        fast_forward_batches=3,
        start_epoch=1,
        learning_rate=0.5,
    )
    assert without_resets(first) == TrainingArgs(learning_rate=0.5)
