import contextlib
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from olmo_hf.data.args import DataArgs
from olmo_hf.errors import ConfigError, DataError, OlmoHfError
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


def deaf_tokenizer(*, deaf_to: str, end: str | None = None) -> PreTrainedTokenizerFast:
    """A token per letter; of the letters `deaf_to` it makes none."""
    words = {letter: 2 + place for place, letter in enumerate("abcdefgh? ")} | {"<unknown>": 1}
    raw = Tokenizer(models.WordLevel(words, unk_token="<unknown>"))
    raw.normalizer = normalizers.Replace(Regex(f"[{deaf_to}]"), "")
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=end)


def build_task(
    folder: Path, tokenizer: PreTrainedTokenizerFast, *, choices: list[str], context: str = "a?", metric: str = "acc"
) -> list:
    (folder / "mine.jsonl").write_text(json.dumps({"options": choices}) + "\n")
    task = f'{{documents: mine.jsonl, context: "{context}", choices: options, answer: "0", separator: ""}}'
    (folder / "tasks.yaml").write_text(f"mine: {task}\n")
    one = EvaluatorArgs(
        type="downstream", tasks=("mine",), task_files=(str(folder / "tasks.yaml"),), metrics=(metric,)
    )
    return build_evaluators(
        EvaluationArgs(evaluators=(one,)),
        eos_token_id=None,
        pad_token_id=None,
        vocab_size=V,
        per_device_eval_batch_size=2,
        tokenizer=tokenizer,
    )


def test_a_continuation_of_which_the_tokenizer_makes_no_token_is_refused(tmp_path: Path) -> None:
    assert len(build_task(tmp_path, deaf_tokenizer(deaf_to="x"), choices=["b", "xc"])) == 1
    with pytest.raises(DataError, match=r"evaluators\[0\]: task mine: .*mine.jsonl.* makes no token of .* 'xx'; mend"):
        build_task(tmp_path, deaf_tokenizer(deaf_to="x"), choices=["b", "xx"])


def test_a_context_without_a_token_needs_one_to_put_there(tmp_path: Path) -> None:
    for context, text in (("{{ '' }}", ""), ("x", "x")):
        with pytest.raises(ConfigError, match=f"task mine has questions whose context is '{text}'"):
            build_task(tmp_path, deaf_tokenizer(deaf_to="x"), choices=["b", "c"], context=context)
        assert build_task(tmp_path, deaf_tokenizer(deaf_to="x", end="<end>"), choices=["b", "c"], context=context)
    spaceless = deaf_tokenizer(deaf_to=" ")  # a space is what stands before a continuation alone, unless told
    assert len(build_task(tmp_path, spaceless, choices=["b", "c"])) == 1
    with pytest.raises(ConfigError, match="whose context is ' '"):
        build_task(tmp_path, spaceless, choices=["b", "c"], metric="pmi_dc")
