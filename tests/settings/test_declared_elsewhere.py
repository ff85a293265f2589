"""Fields that Hugging Face declares are taken out of the tree, typed, or refused."""

from olmo_hf.settings.declared_elsewhere import take_architecture, take_training_arguments
from olmo_hf.settings.problems import Problems


def test_own_fields_stay_and_others_are_taken():
    problems = Problems()
    tree = {"training": {"seed": 1, "ddp_timeout": "30", "torch_compile": "off"}}
    assert take_training_arguments(tree, problems) == {"ddp_timeout": 30, "torch_compile": False}
    assert tree == {"training": {"seed": 1}}
    assert not problems.sentences


def test_a_section_that_is_no_mapping_is_left_to_the_reader():
    problems = Problems()
    assert take_training_arguments({"training": 3}, problems) == {}
    assert take_architecture({"model": None}, problems) == {}
    assert not problems.sentences


def test_the_architecture_must_be_a_mapping_of_known_fields():
    problems = Problems()
    tree = {"model": {"preset": "olmo2_tiny", "config": {"hidden_size": "64", "num_layers": 3}}}
    assert take_architecture(tree, problems) == {"hidden_size": 64}
    assert tree == {"model": {"preset": "olmo2_tiny"}}
    (sentence,) = problems.sentences
    assert sentence.startswith("model.config.num_layers: unknown key in `model.config`; did you mean `num_")
    take_architecture({"model": {"config": 3}}, problems)
    assert problems.sentences[-1] == "model.config: found 3, expected fields of the architecture"
