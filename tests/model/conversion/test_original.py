"""Checkpoints of the original, and files that only look like it."""

import pytest
import torch

from olmo_hf.errors import ConversionError
from olmo_hf.model.conversion.convert import open_checkpoint
from olmo_hf.model.conversion.original import kind_of
from tests.model.conversion.test_convert import write_variant


@pytest.mark.parametrize("content", ["", "model: 3", "a: [", "modle: {}"])
def test_broken_configuration(tmp_path, content):
    (tmp_path / "config.yaml").write_text(content)
    torch.save({}, tmp_path / "model.pt")
    with pytest.raises(ConversionError, match=r"config.yaml"):
        open_checkpoint(tmp_path)


def test_numbers_in_a_handwritten_configuration(tmp_path):
    """Plain YAML readers take `1e-6` for a word."""
    write_variant("olmo2_small", tmp_path / "original")
    text = (tmp_path / "original" / "config.yaml").read_text()
    assert "layer_norm_eps: 1.0e-06" in text
    (tmp_path / "original" / "config.yaml").write_text(text.replace("1.0e-06", "1e-6"))
    assert open_checkpoint(tmp_path / "original").config.rms_norm_eps == 1e-6


def test_kind_is_seen_by_its_files(tmp_path):
    assert kind_of(tmp_path) is None
    (tmp_path / "model.pt").touch()
    assert kind_of(tmp_path) is None, "without config.yaml it is nobody's"
    (tmp_path / "config.yaml").touch()
    assert kind_of(tmp_path) == "unsharded"
