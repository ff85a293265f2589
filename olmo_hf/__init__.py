"""OLMo-2 pretraining, native to the Hugging Face stack.

With this package imported, the Auto classes of transformers know the model type `olmo_hf`, and `datasets` the builder
`olmo_memmap`, whichever is imported first. Public names, and all heavy packages, are loaded when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from olmo_hf.model.registration import register_auto_classes, register_model_type
from olmo_hf.when_imported import when_imported

if TYPE_CHECKING:
    from olmo_hf.config_file import load_run
    from olmo_hf.data.memmap import MemMapDataset
    from olmo_hf.model.configuration_olmo import OlmoHfConfig
    from olmo_hf.model.modeling_olmo import OlmoHfForCausalLM, OlmoHfModel
    from olmo_hf.training.arguments import OlmoTrainingArguments
    from olmo_hf.training.trainer import OlmoTrainer

_HOMES = {
    "MemMapDataset": "olmo_hf.data.memmap",
    "OlmoHfConfig": "olmo_hf.model.configuration_olmo",
    "OlmoHfForCausalLM": "olmo_hf.model.modeling_olmo",
    "OlmoHfModel": "olmo_hf.model.modeling_olmo",
    "OlmoTrainer": "olmo_hf.training.trainer",
    "OlmoTrainingArguments": "olmo_hf.training.arguments",
    "load_run": "olmo_hf.config_file",
}

__all__ = [
    "MemMapDataset",
    "OlmoHfConfig",
    "OlmoHfForCausalLM",
    "OlmoHfModel",
    "OlmoTrainer",
    "OlmoTrainingArguments",
    "load_run",
    "register_auto_classes",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)


def _register_dataset_builder() -> bool:
    import_module("olmo_hf.data.hf_builder").register_dataset_builder()
    return True


when_imported("transformers", register_model_type)
when_imported("datasets", _register_dataset_builder)
