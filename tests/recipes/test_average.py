"""Averages of checkpoints: exact, whole or absent, and refused when they mean nothing."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from olmo_hf.cli.main import main
from olmo_hf.errors import ConversionError
from olmo_hf.model.modeling_olmo import OlmoHfForCausalLM
from olmo_hf.recipes.average import average, open_ingredients
from olmo_hf.recipes.average_card import write_average_card
from tests.model.tiny import tiny_config, tiny_model

GOLDEN = Path(__file__).parent.parent / "golden" / "11_checkpoints"


def saved(directory: Path, seed: int, **changes) -> Path:
    model = tiny_model(**changes)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(directory)
    return directory


@pytest.fixture
def three(tmp_path):
    return [saved(tmp_path / str(seed), seed) for seed in (1, 2, 3)]


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in sorted(directory.glob("model*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def test_the_mean_is_the_nearest_number(three, tmp_path):
    average(open_ingredients(three), tmp_path / "soup")
    parts = [weights_of(path) for path in three]
    for name, tensor in weights_of(tmp_path / "soup").items():
        exact = torch.stack([part[name].double() for part in parts]).mean(0)
        assert torch.equal(tensor, exact.float()), name


def test_shares(three, tmp_path):
    average(open_ingredients(three, [2, 1, 1]), tmp_path / "soup")
    parts = [weights_of(path)["model.norm.weight"].double() for path in three]
    expected = (0.5 * parts[0] + 0.25 * parts[1] + 0.25 * parts[2]).float()
    assert torch.equal(weights_of(tmp_path / "soup")["model.norm.weight"], expected)


def test_equal_checkpoints_stay_bit_for_bit(tmp_path):
    same = [saved(tmp_path / name, 5) for name in ("a", "b", "c")]
    average(open_ingredients(same), tmp_path / "soup")
    before, after = weights_of(same[0]), weights_of(tmp_path / "soup")
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert len({one["weights_sha256"] for one in lineage_of(tmp_path / "soup")}) == 1


def lineage_of(directory: Path) -> list[dict]:
    return json.loads((directory / "lineage.json").read_text())["ingredients"]


def test_it_is_a_model_that_says_what_it_is_made_of(three, tmp_path):
    average(open_ingredients(three), tmp_path / "soup")
    assert OlmoHfForCausalLM.from_pretrained(tmp_path / "soup").config.hidden_size == 32
    card = (tmp_path / "soup" / "README.md").read_text()
    for one in lineage_of(tmp_path / "soup"):
        assert one["checkpoint"] in card
        assert one["weights_sha256"] in card
    assert [one["share"] for one in lineage_of(tmp_path / "soup")] == pytest.approx([1 / 3] * 3)


def test_the_card_says_what_is_not_known():
    one = {"checkpoint": "a", "share": 0.5, "step": None, "tokens": 12_000, "weights_sha256": "ff"}
    card = write_average_card("soup", tiny_config(), [one, one | {"step": 3}])
    assert "| a | 0.5 | not recorded | 12,000 | `ff` |" in card
    assert card.startswith("---\nlibrary_name: transformers\n")


def test_large_models_are_cut_into_files(three, tmp_path):
    average(open_ingredients(three), tmp_path / "soup", max_shard_bytes=20_000)
    assert len(list((tmp_path / "soup").glob("model-*.safetensors"))) > 1
    OlmoHfForCausalLM.from_pretrained(tmp_path / "soup")


def test_precision_of_the_result(three, tmp_path):
    average(open_ingredients(three), tmp_path / "soup", dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in weights_of(tmp_path / "soup").values()} == {torch.bfloat16}


def test_a_checkpoint_of_the_original_is_an_ingredient_too(tmp_path):
    source = GOLDEN / "step30-unsharded"
    assert main(["convert", str(source), str(tmp_path / "converted"), "--no-optimizer"]) == 0
    average(open_ingredients([source, tmp_path / "converted"]), tmp_path / "soup")
    before, after = weights_of(tmp_path / "converted"), weights_of(tmp_path / "soup")
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_architectures_that_differ_are_refused(three, tmp_path):
    other = saved(tmp_path / "other", 4, num_key_value_heads=2)
    with pytest.raises(ConversionError, match=r"(?s)num_key_value_heads is 2.*k_proj.*shape"):
        open_ingredients([three[0], other])


def test_the_same_one_twice_is_refused(three):
    with pytest.raises(ConversionError, match="given twice; use --weights"):
        open_ingredients([three[0], three[0]])


@pytest.mark.parametrize("weights", [[1, 2], [1, 1, 0], [1, 1, -1], [1, 1, float("nan")]])
def test_weights_that_mean_nothing_are_refused(three, weights):
    with pytest.raises(ConversionError, match="--weights"):
        open_ingredients(three, weights)


def with_tokenizer(directory: Path, words: list[str]) -> None:
    vocabulary = {word: number for number, word in enumerate(["<eos>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(directory)


def test_tokenizers(three, tmp_path):
    for path in three[:2]:
        with_tokenizer(path, ["a", "b"])
    average(open_ingredients(three), tmp_path / "soup")
    assert (tmp_path / "soup" / "tokenizer.json").is_file()
    with_tokenizer(three[2], ["b", "a"])
    with pytest.raises(ConversionError, match="tokenizers differ"):
        open_ingredients(three)


def test_weights_that_are_no_numbers_leave_nothing_behind(three, tmp_path):
    model = OlmoHfForCausalLM.from_pretrained(three[1])
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    model.save_pretrained(three[1])
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ConversionError, match=r"model\.norm\.weight holds numbers that are not finite"):
        average(open_ingredients(three), tmp_path / "soup")
    assert sorted(tmp_path.iterdir()) == before


def test_runs_that_differ_are_told_apart_in_the_card():
    ingredients = [
        {"checkpoint": name, "share": 1 / 3, "step": 1, "tokens": 1, "weights_sha256": "ff"}
        for name in ("a", "b", "c")
    ]
    settings = [{"data": {"paths": [path]}} for path in ("x.npy", "x.npy", "y.npy")]
    card = write_average_card("soup", tiny_config(), ingredients, settings)
    assert "`a`, `b`:\n\n- `x.npy`" in card
    assert "`c`:\n\n- `y.npy`" in card
    assert "## Recipe\n\nNot recorded.\n" in card
