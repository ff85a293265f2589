"""Weights for a model that has been spread over ranks: drawn or read, each rank its own part.

A model made on the meta device is sharded, given memory (`to_empty`) and filled here, so that no rank ever holds more
of it than it keeps.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open

from olmo_hf.errors import CheckpointError
from olmo_hf.model.args import ModelArgs
from olmo_hf.model.init import initialize_weights, local_slice, plain_name
from olmo_hf.model.modeling_olmo import OlmoHfForCausalLM

_NO_WEIGHTS = "rotary_emb.inv_freq"
"""Kept by some older checkpoints; a table that is worked out from the configuration."""


def fill_weights(model: OlmoHfForCausalLM, args: ModelArgs, *, seed: int) -> None:
    """Give every parameter its first value, in place; of a sharded parameter (DTensor) only the part held here.

    Args:
        model: the whole model, possibly under FSDP2, with memory.
        args: the `model` section; `init_from` is read, without it weights are drawn.
        seed: of the drawn weights; equal for every number of ranks.

    Raises:
        CheckpointError: `init_from` lacks weights of this model, or holds others.
    """
    if args.init_from is None:
        initialize_weights(model, seed)
    else:
        read_weights(model, args.init_from)


@torch.no_grad()
def read_weights(model: OlmoHfForCausalLM, source: str) -> None:
    """Copy the weights of a Hugging Face checkpoint into the model, in place; of each tensor only the part held here.

    Raises:
        CheckpointError: as `check_weights`.
    """
    model.tie_weights()  # to_empty separates tied weights
    where = check_weights(model, source)
    targets: dict[Path, dict[str, torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        targets.setdefault(where[plain_name(name)], {})[plain_name(name)] = parameter
    for path, parameters in targets.items():
        with safe_open(path, framework="pt") as file:
            for name, target in parameters.items():
                local, part = local_slice(target)
                if local.numel() > 0:
                    local.copy_(file.get_slice(name)[part])


def check_weights(model: OlmoHfForCausalLM, source: str) -> dict[str, Path]:
    """In which file each tensor of a checkpoint lies, after its names and shapes were compared with the model's.

    Args:
        model: with or without memory.
        source: a directory or a hub id.

    Raises:
        CheckpointError: files are missing or damaged, or the tensors are not this model's.
    """
    where: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    try:
        for path in _weight_files(source):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  (safe_open is not a mapping)
                    where[name], shapes[name] = path, tuple(file.get_slice(name).get_shape())
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"model.init_from: the weights in {source} cannot be read: {error}; choose a whole one"
        ) from error
    expected = {plain_name(name): tuple(parameter.shape) for name, parameter in model.named_parameters()}
    spare = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    differences = {
        "missing keys": sorted(expected.keys() - where.keys()),
        "unexpected keys": sorted(n for n in where.keys() - expected.keys() - spare if not n.endswith(_NO_WEIGHTS)),
        "mismatched keys": sorted(n for n in expected.keys() & where.keys() if expected[n] != shapes[n]),
    }
    require_no_differences(source, differences)
    return where


def require_no_differences(source: str, differences: Mapping[str, Sequence[str]]) -> None:
    """Refuse weights that are not those of the model.

    Args:
        source: where they are.
        differences: names of weights by what is wrong with them.

    Raises:
        CheckpointError: there is one.
    """
    found = [f"{kind}: {', '.join(names[:5])}" for kind, names in differences.items() if names]
    if found:
        raise CheckpointError(
            f"model.init_from: the weights in {source} are not those of this model ({'; '.join(found)}); choose a "
            "checkpoint of the same architecture or correct model.config"
        )


def _weight_files(source: str) -> list[Path]:
    directory = Path(source)
    if not directory.is_dir():
        directory = Path(snapshot_download(source, allow_patterns=["*.safetensors", "*.json"]))
    files = sorted(directory.glob("model*.safetensors"))
    if not files:
        raise OSError(f"there is no model.safetensors or model-*.safetensors in {directory}")
    return files
