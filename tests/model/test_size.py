"""Counts of the released models (spec: model.md section 13) and of odd shapes against real parameters."""

import pytest
import torch

from olmo_hf.model.configuration_olmo import OlmoHfConfig
from olmo_hf.model.modeling_olmo import OlmoHfForCausalLM
from olmo_hf.model.presets import PRESETS
from olmo_hf.model.size import count_parameters, flops_per_token
from tests.model.tiny import SHAPES, tiny_config

# name: all parameters, without embeddings, per layer, forward and backward FLOPs per token at full length
RELEASED = {
    "olmo2_7b": (7_298_617_344, 6_887_575_552, 202_391_552, 15_922_634_752, 33_489_436_672),
    "olmo2_13b": (13_716_198_400, 13_202_396_160, 317_214_720, 29_760_235_520, 61_575_680_000),
    "olmo2_1b": (1_484_916_736, 1_279_395_840, 67_117_056, 3_095_662_592, 7_013_408_768),
    "olmo1_7b": (6_888_095_744, 6_682_050_560, 202_375_168, 14_437_842_944, 29_699_866_624),
    "olmo1_1b": (1_176_764_416, 1_073_741_824, 67_108_864, 2_415_919_104, 5_243_928_576),
}
# Millions, as the recipes round them: all parameters, without embeddings.
LADDER = {
    "olmo_20m": (34.1, 21.3),
    "olmo_60m": (85.1, 59.3),
    "olmo_150m": (190.5, 151.9),
    "olmo_300m": (371.5, 320.0),
    "olmo_700m": (758.6, 681.3),
}


@pytest.mark.parametrize("name", RELEASED)
def test_released_models(name):
    config = OlmoHfConfig(**PRESETS[name])
    count, flops = count_parameters(config), flops_per_token(config, config.max_position_embeddings)
    found = (count.total, count.non_embedding, count.per_layer, flops.forward, flops.backward)
    assert found == RELEASED[name]


@pytest.mark.parametrize("name", LADDER)
def test_small_models(name):
    count = count_parameters(OlmoHfConfig(**PRESETS[name]))
    assert (round(count.total / 1e6, 1), round(count.non_embedding / 1e6, 1)) == LADDER[name]


def test_the_tiny_preset_is_for_laptops():
    assert 2e6 < count_parameters(OlmoHfConfig(**PRESETS["olmo2_tiny"])).total < 6e6


@pytest.mark.parametrize("config", [*PRESETS, *SHAPES])
def test_counts_equal_the_real_model(config):
    config = OlmoHfConfig(**PRESETS[config]) if config in PRESETS else tiny_config(**SHAPES[config])
    with torch.device("meta"):
        model = OlmoHfForCausalLM(config)
    assert count_parameters(config).total == sum(p.numel() for p in model.parameters())
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    assert count_parameters(config).per_layer == layer


def test_flops_grow_with_the_sequence():
    config = tiny_config()
    short, long = flops_per_token(config, 16), flops_per_token(config, 32)
    attention = 4 * config.num_hidden_layers * config.hidden_size * 16
    assert long.forward - short.forward == attention
    assert long.backward - short.backward == 2 * attention
    assert long.total == long.forward + long.backward
