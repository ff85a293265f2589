"""Makes the Auto classes of transformers know this package's model."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from olmo_hf.model.configuration_olmo import OlmoHfConfig
from olmo_hf.model.modeling_olmo import OlmoHfForCausalLM, OlmoHfModel


def register_model_type() -> None:
    """Teach the Auto classes the model type `olmo_hf`. Done by `import olmo_hf`."""
    _register(OlmoHfConfig)


def register_auto_classes() -> None:
    """From now on, in this process, the Auto classes load `olmo2` and `olmo` checkpoints as this package's classes.

    Never done by importing: it changes what every other user of transformers in the process gets.
    """
    for model_type in ("olmo2", "olmo"):
        # The Auto classes insist that a configuration class is called as the model expects and says this model type.
        _register(type(OlmoHfConfig.__name__, (OlmoHfConfig,), {"model_type": model_type, "__module__": __name__}))


def _register(config_class: type[OlmoHfConfig]) -> None:
    AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
    AutoModel.register(config_class, OlmoHfModel, exist_ok=True)
    AutoModelForCausalLM.register(config_class, OlmoHfForCausalLM, exist_ok=True)
