"""Nothing in a checkpoint is ever run."""

import base64
import pickle
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from olmo_hf.errors import ConversionError
from olmo_hf.model.conversion.convert import open_checkpoint
from olmo_hf.model.conversion.safe_load import check_index, decode_tensor_name, encode_tensor_name

CHECKPOINTS = Path(__file__).parents[2] / "golden" / "11_checkpoints"


class Poison:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("where", ["model.pt", "optim.pt", "train.pt", "rank0.pt", ".metadata", "model.safetensors"])
def test_code_in_a_checkpoint_is_never_run(tmp_path, where):
    """Every format of the original that is a pickle, poisoned."""
    trap, source = tmp_path / "trap", tmp_path / "source"
    good = {"rank0.pt": "sharded_torch_legacy_ws2", ".metadata": "sharded_olmo_core_ws2"}.get(
        where, "step30-unsharded"
    )
    shutil.copytree(CHECKPOINTS / good, source)
    if where == ".metadata":
        (source / where).write_bytes(pickle.dumps(Poison(trap)))
    elif where == "model.safetensors":
        key = base64.urlsafe_b64encode(pickle.dumps(((Poison(trap),), False))).decode()
        save_file({key: torch.zeros(2)}, source / where)
    else:
        torch.save({"a": Poison(trap)}, source / where)
    with pytest.raises(ConversionError, match="cannot be read safely"):
        open_checkpoint(source)
    assert not trap.exists()
    Poison(trap).__reduce__()[0](trap)
    assert trap.exists(), "the trap works: the test can fail"


def test_names_of_encoded_safetensors():
    assert encode_tensor_name(("transformer.wte.weight",)) == (
        "gASVHwAAAAAAAACMFnRyYW5zZm9ybWVyLnd0ZS53ZWlnaHSUhZSJhpQu"
    ), "as the original writes it"
    assert decode_tensor_name(encode_tensor_name(("state", "x.weight", "exp_avg"))) == (
        ("state", "x.weight", "exp_avg"),
        False,
    )


def test_the_index_of_a_run_is_checked_before_torch_reads_it(tmp_path):
    model, trap = torch.nn.Linear(4, 4), tmp_path / "trap"
    state = {"a": model.state_dict(), "number": 3, "flags": torch.tensor([True]), "half": torch.zeros(2).bfloat16()}
    dcp.save(state, checkpoint_id=tmp_path / "good", no_dist=True)
    check_index(tmp_path / "good")
    for content in (pickle.dumps(Poison(trap)), b"", b"nonsense", pickle.dumps(3)[:-1]):
        (tmp_path / "good" / ".metadata").write_bytes(content)
        with pytest.raises(ConversionError, match="cannot be read safely"):
            check_index(tmp_path / "good")
    (tmp_path / "good" / ".metadata").unlink()
    with pytest.raises(ConversionError, match=r"\.metadata"):
        check_index(tmp_path / "good")
    assert not trap.exists()
