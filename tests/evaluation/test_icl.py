"""Tasks on a small model: the same figures however they are computed; and questions that do not fit."""

import contextlib
import math

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import fully_shard

from olmo_hf.evaluation.icl import DownstreamEvaluator, DownstreamOptions, questions_of_rank
from olmo_hf.evaluation.tasks.questions import Option, Question
from olmo_hf.training.evaluating import run_evaluators
from tests.evaluation.test_perplexity import CPU, V, tiny_model
from tests.joined import JoinedRanks

WORDS = "abcdefghijklmnopqrstuvwxyz "


def encode(texts: list[str]) -> list[list[int]]:
    """A token per letter."""
    return [[2 + WORDS.index(letter) for letter in text] for text in texts]


def questions(count: int, *, seed: int = 0, longest: int = 12) -> list[Question]:
    rng = np.random.default_rng(seed)

    def text(shortest: int, most: int) -> str:
        return "".join(rng.choice(list(WORDS[:6]), rng.integers(shortest, most)))

    found = []
    for number in range(count):
        context = text(1, longest)
        choices = [" " + text(1, 6) for _ in range(rng.integers(2, 5))]
        options = tuple(Option(context, choice, len(choice) - 1, len(choice) - 1, "q") for choice in choices)
        found.append(Question(options, int(rng.integers(len(choices))), f"question {number}"))
    return found


def evaluator(
    asked: list[Question], *, metrics: tuple[str, ...] = ("acc", "bpb"), **options: int
) -> DownstreamEvaluator:
    settings = {"max_context_tokens": 32, "batch_tokens": 64, "empty_context": 0} | options
    return DownstreamEvaluator("task", asked, encode, metrics=metrics, options=DownstreamOptions(**settings))


def evaluate(model: torch.nn.Module, *evaluators: DownstreamEvaluator) -> dict[str, float]:
    return run_evaluators(evaluators, model, device=CPU, autocast=contextlib.nullcontext)


def test_every_metric_under_its_name_and_twice_the_same() -> None:
    model, one = tiny_model(), evaluator(questions(9), metrics=("acc", "len_norm", "pmi_dc", "ce_loss", "bpb"))
    found = evaluate(model, one)
    assert list(found) == [
        "eval/downstream/task_acc",
        "eval/downstream/task_len_norm",
        "eval/downstream/task_pmi_dc",
        "eval/downstream_ce_loss/task_ce_loss",
        "eval/downstream_bpb/task_bpb",
    ]
    assert all(0 <= found[name] <= 1 for name in list(found)[:3])
    assert evaluate(model, one) == found


@pytest.mark.parametrize("batch_tokens", [1, 40, 1000])
def test_batches_change_nothing(batch_tokens: int) -> None:
    model, asked = tiny_model(), questions(20)
    whole = evaluate(model, evaluator(asked, batch_tokens=200))
    parts = evaluate(model, evaluator(asked, batch_tokens=batch_tokens))
    assert parts["eval/downstream/task_acc"] == whole["eval/downstream/task_acc"]
    # Sums of at most five float32 logarithms in other batches.
    assert parts["eval/downstream_bpb/task_bpb"] == pytest.approx(whole["eval/downstream_bpb/task_bpb"], rel=1e-5)


def test_a_uniform_model_pays_the_logarithm_of_the_vocabulary_for_every_token() -> None:
    sums = evaluator(asked := questions(7)).log_likelihoods(
        tiny_model(zero_head=True).eval().requires_grad_(False), device=CPU, autocast=contextlib.nullcontext
    )
    tokens = [len(option.continuation) for question in asked for option in question.options]
    np.testing.assert_allclose(sums, -math.log(V) * np.array(tokens), rtol=1e-6)


def test_what_is_too_long_loses_its_beginning_and_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    asked = questions(5, longest=3)
    long = Question(tuple(Option("ab" * 40, o.continuation, 1, 1, "q") for o in asked[0].options), 0, "long")
    end = Question(tuple(Option(("ab" * 40)[-8:], o.continuation, 1, 1, "q") for o in asked[0].options), 0, "end")
    model = tiny_model().eval().requires_grad_(False)
    limit = 7 + max(len(o.continuation) for o in asked[0].options)
    cut = evaluator([long, *asked], max_context_tokens=limit)
    sums = cut.log_likelihoods(model, device=CPU, autocast=contextlib.nullcontext)
    assert cut.num_truncated == 1
    assert "1 of 6 questions" in caplog.text
    assert f"{limit} tokens" in caplog.text
    expected = evaluator([end], max_context_tokens=limit).log_likelihoods(
        model, device=CPU, autocast=contextlib.nullcontext
    )
    longest = max(range(len(end.options)), key=lambda place: len(end.options[place].continuation))
    assert sums[longest] == pytest.approx(expected[longest], rel=1e-5), "its last tokens fit the limit exactly"


def test_a_continuation_longer_than_the_model_is_scored_at_its_end() -> None:
    asked = [Question((Option("a", " " + "bc" * 30, 60, 60, "q"),), 0, "long")]
    one = evaluator(asked, max_context_tokens=10)
    sums = one.log_likelihoods(tiny_model(zero_head=True).eval(), device=CPU, autocast=contextlib.nullcontext)
    assert one.num_truncated == 1
    assert sums[0] == pytest.approx(-10 * math.log(V), rel=1e-6)


def test_an_empty_context_is_begun_with_a_token() -> None:
    asked = [Question((Option("", "ab", 2, 2, "q"), Option("", "ba", 2, 2, "q")), 0, "empty")]
    assert math.isfinite(evaluate(tiny_model(), evaluator(asked))["eval/downstream_bpb/task_bpb"])


def test_a_broken_model_reports_no_number() -> None:
    model = tiny_model()
    model.lm_head.weight.data[3, 0] = math.nan
    assert all(math.isnan(value) for value in evaluate(model, evaluator(questions(5))).values())


@pytest.mark.parametrize(("count", "world"), [(1, 3), (7, 2), (64, 4), (100, 3)])
def test_every_question_is_somebodys(count: int, world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, dealt = questions(count), []
    for rank in range(world):
        monkeypatch.setattr("olmo_hf.distributed.world_size", lambda: world)
        monkeypatch.setattr("olmo_hf.distributed.rank", lambda rank=rank: rank)
        dealt += questions_of_rank(asked)
    assert sorted(dealt) == list(range(count))


class Counted(torch.nn.parallel.DistributedDataParallel):
    def forward(self, *arguments, **words):
        raise AssertionError("evaluation must not exchange buffers before every pass")


def sharded(model):
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def figures_of_a_rank(rank: int) -> dict[str, list[dict[str, float]]]:
    metrics = ("acc", "pmi_dc", "bpb")
    tasks = [questions(17), questions(1), questions(40, seed=3)]
    return {
        name: [evaluate(wrap(tiny_model()), evaluator(asked, metrics=metrics)) for asked in tasks]
        for name, wrap in (("ddp", Counted), ("fsdp2", sharded))
    }


def test_two_ranks_say_what_one_says(two_ranks: JoinedRanks) -> None:
    first, second = two_ranks(figures_of_a_rank)
    assert first == second, "all ranks must hold the same figures"
    metrics = ("acc", "pmi_dc", "bpb")
    for place, asked in enumerate([questions(17), questions(1), questions(40, seed=3)]):
        alone = evaluate(tiny_model(), evaluator(asked, metrics=metrics))
        for name in ("ddp", "fsdp2"):
            assert first[name][place] == pytest.approx(alone, rel=1e-5), (
                f"{name}: nothing is counted twice or left out"
            )
