import contextlib
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from olmo_hf.data.args import DataArgs
from olmo_hf.errors import ConfigError, OlmoHfError
from olmo_hf.evaluation.args import EvaluationArgs, EvaluatorArgs
from olmo_hf.evaluation.build import build_evaluators
from olmo_hf.training.evaluating import run_evaluators
from tests.evaluation.test_perplexity import S, V, tiny_model


def data(path: Path, count: int, **options) -> DataArgs:
    np.random.default_rng(count).integers(2, V, count * S, dtype=np.uint16).tofile(path)
    return DataArgs(paths=(str(path),), token_dtype="uint16", sequence_length=S, **options)


def build(args: EvaluationArgs) -> list:
    return build_evaluators(args, eos_token_id=0, pad_token_id=1, vocab_size=V, per_device_eval_batch_size=2)


def test_evaluators_read_their_own_files_in_the_order_of_the_configuration(tmp_path: Path) -> None:
    masks = tmp_path / "masks.npy"
    flags = np.zeros((5, S), dtype=bool)
    flags[2, 4] = True
    flags.tofile(masks)
    args = EvaluationArgs(
        evaluators=(
            EvaluatorArgs(label="wiki", data=data(tmp_path / "a.npy", 3), max_instances=2),
            EvaluatorArgs(label="books", data=data(tmp_path / "b.npy", 5, label_mask_paths=(str(masks),))),
        )
    )
    evaluators = build(args)
    assert [evaluator.label for evaluator in evaluators] == ["wiki", "books"]
    model = tiny_model()
    metrics = run_evaluators(evaluators, model, device=torch.device("cpu"), autocast=contextlib.nullcontext)
    assert list(metrics) == [
        "eval/wiki/CrossEntropyLoss",
        "eval/wiki/Perplexity",
        "eval/books/CrossEntropyLoss",
        "eval/books/Perplexity",
    ]
    tokens = torch.from_numpy(np.fromfile(tmp_path / "b.npy", dtype=np.uint16).astype(np.int64)).view(5, S)
    with torch.no_grad():
        logits = model.eval()(input_ids=tokens[2:3], use_cache=False).logits[0, 3].double()
    one_target = -float(torch.log_softmax(logits, -1)[tokens[2, 4]])
    assert metrics["eval/books/CrossEntropyLoss"] == pytest.approx(one_target, abs=2e-6)
    assert metrics["eval/books/Perplexity"] == pytest.approx(math.exp(one_target), rel=1e-5)


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    good = data(tmp_path / "a.npy", 3)
    args = EvaluationArgs(
        interval=0,
        evaluators=(
            EvaluatorArgs(label="x", data=good, max_instances=0),
            EvaluatorArgs(label="x", data=good, bytes_per_token=0.0),
            EvaluatorArgs(),
        ),
    )
    with pytest.raises(ConfigError) as caught:
        build(args)
    assert [problem.split(" is ")[0] for problem in caught.value.problems] == [
        "evaluation.interval",
        "evaluation.evaluators[0].max_instances",
        "evaluation.evaluators[1].bytes_per_token",
        "evaluation.evaluators[1].label",
        "evaluation.evaluators[2].label",
        "evaluation.evaluators[2].data.paths",
    ]


def test_missing_files_are_refused_before_anything_runs(tmp_path: Path) -> None:
    absent = DataArgs(paths=(str(tmp_path / "absent.npy"),), token_dtype="uint16", sequence_length=S)
    with pytest.raises(OlmoHfError, match=r"absent\.npy"):
        build(EvaluationArgs(evaluators=(EvaluatorArgs(label="x", data=absent),)))
