"""Token-exact perplexity: figures known in closed form, and the same figure however the set is cut up."""

import contextlib
import math
import random

import numpy as np
import pytest
import torch
from transformers import Olmo2Config, Olmo2ForCausalLM

from olmo_hf.data.collator import DataCollator
from olmo_hf.evaluation.perplexity import PerplexityEvaluator, batches_of_rank, cross_entropy_sums
from olmo_hf.training.evaluating import run_evaluators
from olmo_hf.training.metrics import perplexity
from tests.joined import JoinedRanks

V, S = 128, 12
CPU = torch.device("cpu")


def tiny_model(seed: int = 0, zero_head: bool = False) -> Olmo2ForCausalLM:
    torch.manual_seed(seed)
    config = Olmo2Config(
        vocab_size=V,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        attention_dropout=0.0,
        tie_word_embeddings=False,
        pad_token_id=1,
        eos_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    )
    model = Olmo2ForCausalLM(config)
    if zero_head:
        torch.nn.init.zeros_(model.lm_head.weight)
    else:
        model.lm_head.weight.data.mul_(20)  # losses that differ from token to token
    return model


def instances(count: int, *, masked: bool) -> list[dict]:
    """Instances whose labels are masked very unequally, so that a mean of means would be wrong."""
    generator = np.random.default_rng(5)
    items = []
    for index in range(count):
        item = {"input_ids": torch.from_numpy(generator.integers(2, V, S)), "index": index}
        if masked:
            item["label_mask"] = torch.from_numpy(generator.random(S) < (index + 1) / (count + 1))
        items.append(item)
    return items


def evaluator(items: list[dict], batch_size: int, **options) -> PerplexityEvaluator:
    return PerplexityEvaluator("set", items, DataCollator(pad_token_id=1), batch_size=batch_size, **options)


def evaluate(model: torch.nn.Module, *evaluators: PerplexityEvaluator) -> dict[str, float]:
    return run_evaluators(evaluators, model, device=CPU, autocast=contextlib.nullcontext)


def mean_by_hand(model: torch.nn.Module, items: list[dict]) -> float:
    total, count = 0.0, 0
    for item in items:
        with torch.no_grad():
            logits = model.eval()(input_ids=item["input_ids"][None], use_cache=False).logits[0].double()  # (S, V)
        for position in range(1, S):
            if "label_mask" in item and not item["label_mask"][position]:
                continue
            total -= float(torch.log_softmax(logits[position - 1], -1)[item["input_ids"][position]])
            count += 1
    return total / count


def test_zero_head_gives_the_logarithm_of_the_vocabulary() -> None:
    metrics = evaluate(tiny_model(zero_head=True), evaluator(instances(5, masked=True), 2))
    # float32 logarithm of 128 has an error of at most 2.4e-7 (half a unit in the last place at 4.85).
    assert metrics["eval/set/CrossEntropyLoss"] == pytest.approx(4.852030263919617, abs=2.4e-7)
    assert metrics["eval/set/Perplexity"] == pytest.approx(128, rel=2.4e-7)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 7, 16])
def test_mean_over_tokens_whatever_the_batch_size(batch_size: int) -> None:
    model, items = tiny_model(), instances(7, masked=True)
    expected = mean_by_hand(model, items)
    per_instance = [mean_by_hand(model, [item]) for item in items if item["label_mask"][1:].any()]
    assert abs(np.mean(per_instance) - expected) > 1e-2, "the data must tell a mean of means from the mean"
    metrics = evaluate(model, evaluator(items, batch_size))
    # float32 forward passes of other shapes differ in the last bits only.
    assert metrics["eval/set/CrossEntropyLoss"] == pytest.approx(expected, abs=2e-6)


def test_mean_over_instances_counts_masked_targets_as_the_original() -> None:
    model, items = tiny_model(), instances(5, masked=True)
    sums = []
    for item in items:
        counted = int(item["label_mask"][1:].sum())
        sums.append(mean_by_hand(model, [item]) * counted / (S - 1) if counted else 0.0)
    metrics = evaluate(model, evaluator(items, 2, mean_over="instances"))
    assert metrics["eval/set/CrossEntropyLoss"] == pytest.approx(float(np.mean(sums)), abs=2e-6)


def test_max_instances_takes_the_first() -> None:
    model, items = tiny_model(), instances(7, masked=False)
    some = evaluate(model, evaluator(items, 2, max_instances=3))
    assert some == evaluate(model, evaluator(items[:3], 2))
    assert evaluate(model, evaluator(items, 2, max_instances=100)) == evaluate(model, evaluator(items, 2))


def test_bits_per_byte() -> None:
    metrics = evaluate(tiny_model(zero_head=True), evaluator(instances(2, masked=False), 2, bytes_per_token=3.5))
    assert metrics["eval/set/BitsPerByte"] == pytest.approx(2.0, rel=1e-6)  # 7 bits per token of 3.5 bytes


def test_a_set_without_targets_reports_nothing_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    items = [{"input_ids": torch.arange(S), "instance_mask": False} for _ in range(3)]
    assert evaluate(tiny_model(), evaluator(items, 2)) == {}
    assert "no labelled target" in caplog.text


def test_nan_is_reported_as_nan() -> None:
    model = tiny_model()
    model.lm_head.weight.data[3, 0] = math.nan
    metrics = evaluate(model, evaluator(instances(2, masked=False), 2))
    assert math.isnan(metrics["eval/set/CrossEntropyLoss"])
    assert math.isnan(metrics["eval/set/Perplexity"])


def test_perplexity_never_overflows() -> None:
    assert perplexity(1000.0) == math.inf
    assert perplexity(0.0) == 1.0


def test_training_is_left_untouched_and_repeating_gives_the_same() -> None:
    model = tiny_model().train()
    one = evaluator(instances(5, masked=False), 2)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    first = evaluate(model, one)
    assert model.training
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])
    assert all(parameter.grad is None for parameter in model.parameters())
    assert evaluate(model, one) == first == evaluate(model, one)


def test_training_mode_and_random_states_return_after_an_error() -> None:
    class Broken:
        label = "broken"

        def evaluate(self, model, *, device, autocast):
            torch.rand(3), random.random(), np.random.rand()
            assert not model.training
            assert not torch.is_grad_enabled()
            raise RuntimeError("broken")

    model = tiny_model().train()
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="broken"):
        run_evaluators([Broken()], model, device=CPU, autocast=contextlib.nullcontext)
    assert model.training
    assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("count", "batch_size", "world_size"), [(7, 2, 2), (1, 4, 3), (8, 2, 2), (10, 3, 4), (2, 1, 2)]
)
def test_every_instance_counts_once_and_ranks_take_the_same_number_of_batches(
    count: int, batch_size: int, world_size: int
) -> None:
    by_rank = [
        list(batches_of_rank(count, batch_size=batch_size, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    assert len({len(batches) for batches in by_rank}) == 1
    assert all(len(places) == batch_size for batches in by_rank for places, _ in batches)
    counted = [place for batches in by_rank for places, number in batches for place in places[:number]]
    assert sorted(counted) == list(range(count))


def test_cross_entropy_sums_take_any_float_type() -> None:
    torch.manual_seed(1)
    logits = torch.randn(3, S, V)
    labels = torch.randint(0, V, (3, S))
    labels[1, 4:] = -100
    sums, counts = cross_entropy_sums(logits.bfloat16(), labels)
    assert counts.tolist() == [S - 1, 3, S - 1]
    expected = torch.nn.functional.cross_entropy(
        logits.bfloat16().float()[:, :-1].reshape(-1, V), labels[:, 1:].reshape(-1), reduction="sum"
    )
    assert sums.dtype == torch.float64
    assert sums.sum().item() == pytest.approx(expected.item(), rel=1e-6)


def figures_of_a_rank(rank: int) -> dict[str, dict[str, float]]:
    def wrap(model):
        # Buffers make every forward pass of DDP a collective: unequal numbers of batches would hang here.
        return torch.nn.parallel.DistributedDataParallel(model)

    return {
        "zero": evaluate(wrap(tiny_model(zero_head=True)), evaluator(instances(3, masked=True), 2)),
        "odd": evaluate(wrap(tiny_model()), evaluator(instances(7, masked=True), 2)),
        "one": evaluate(wrap(tiny_model()), evaluator(instances(1, masked=False), 2)),
    }


def test_two_ranks_give_what_one_gives(two_ranks: JoinedRanks) -> None:
    outputs = two_ranks(figures_of_a_rank)
    assert outputs[0] == outputs[1], "all ranks must hold the same figures"
    assert outputs[0]["zero"]["eval/set/CrossEntropyLoss"] == pytest.approx(math.log(V), abs=2.4e-7)
    for name, count, masked in (("odd", 7, True), ("one", 1, False)):
        alone = evaluate(tiny_model(), evaluator(instances(count, masked=masked), 2))
        assert outputs[0][name]["eval/set/CrossEntropyLoss"] == pytest.approx(
            alone["eval/set/CrossEntropyLoss"], abs=2e-6
        )
