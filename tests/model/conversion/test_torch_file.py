"""Files for `torch.load`, written tensor by tensor."""

import torch

from olmo_hf.model.conversion.lazy import LazyTensor, in_memory
from olmo_hf.model.conversion.torch_file import write_torch_file


def test_what_torch_reads_is_what_was_written(tmp_path):
    tensors = {
        "a": torch.randn(3, 4),
        "b": torch.randn(2, 3).bfloat16(),
        "number": torch.tensor(7.0),
        "empty": torch.empty(0, 5),
        "transposed": torch.randn(6, 4).T,
        "flags": torch.tensor([True, False]),
    }
    content = {
        "state": {"layer": {name: in_memory(tensor) for name, tensor in tensors.items()}},
        "groups": [{"betas": (0.9, 0.95), "names": ["x", "y"], "fused": None, "first": in_memory(tensors["a"])}],
    }
    write_torch_file(tmp_path / "x.pt", content)
    for options in ({"weights_only": True}, {"weights_only": False}, {"weights_only": True, "mmap": True}):
        found = torch.load(tmp_path / "x.pt", **options)
        assert found["state"]["layer"].keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert found["state"]["layer"][name].dtype == tensor.dtype
            assert torch.equal(found["state"]["layer"][name], tensor), name
        (group,) = found["groups"]
        assert torch.equal(group.pop("first"), tensors["a"])
        assert group == {"betas": (0.9, 0.95), "names": ["x", "y"], "fused": None}


def test_one_tensor_at_a_time(tmp_path):
    """Reading the next tensor finds no earlier one alive."""
    alive = []

    def read(number):
        import weakref

        assert not any(reference() is not None for reference in alive)
        tensor = torch.full((1000,), float(number))
        alive.append(weakref.ref(tensor))
        return tensor

    content = {str(n): LazyTensor((1000,), torch.float32, lambda n=n: read(n)) for n in range(5)}
    write_torch_file(tmp_path / "x.pt", content)
    assert len(alive) == 5
    assert [float(t[-1]) for t in torch.load(tmp_path / "x.pt", weights_only=True).values()] == [0, 1, 2, 3, 4]
