"""Makes the Auto classes of transformers know this package's model.

Nothing heavy is imported here before it is needed: `olmo_hf/__init__.py` has `register_model_type` called when
transformers itself has been imported.
"""

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from olmo_hf.model.configuration_olmo import OlmoHfConfig


def register_model_type() -> bool:
    """Teach those Auto classes that have been imported the model type `olmo_hf`; returns whether all have been.

    Called by `when_imported`, which waits until no module of transformers and of this package is half imported.
    """
    configs = sys.modules.get("transformers.models.auto.configuration_auto")
    if configs is None:
        return False
    from olmo_hf.model.configuration_olmo import OlmoHfConfig

    configs.AutoConfig.register(OlmoHfConfig.model_type, OlmoHfConfig, exist_ok=True)
    # Asked only now: the import above may have brought it.
    if "transformers.models.auto.modeling_auto" not in sys.modules:
        return False
    _register_models(OlmoHfConfig)
    return True


def register_auto_classes() -> None:
    """From now on, in this process, the Auto classes load `olmo2` and `olmo` checkpoints as this package's classes.

    Never done by importing: it changes what every other user of transformers in the process gets.
    """
    from transformers import AutoConfig

    from olmo_hf.model.configuration_olmo import OlmoHfConfig

    for model_type in ("olmo2", "olmo"):
        # The Auto classes insist that a configuration class is called as the model expects and says this model type.
        named = type(OlmoHfConfig.__name__, (OlmoHfConfig,), {"model_type": model_type, "__module__": __name__})
        AutoConfig.register(model_type, named, exist_ok=True)
        _register_models(named)


def _register_models(config_class: "type[OlmoHfConfig]") -> None:
    from transformers.models.auto.modeling_auto import AutoModel, AutoModelForCausalLM

    from olmo_hf.model.modeling_olmo import OlmoHfForCausalLM, OlmoHfModel

    AutoModel.register(config_class, OlmoHfModel, exist_ok=True)
    AutoModelForCausalLM.register(config_class, OlmoHfForCausalLM, exist_ok=True)
