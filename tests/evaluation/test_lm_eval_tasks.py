"""lm-evaluation-harness on the same documents says what evaluation while training says; and generates, offline."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Olmo2Config, Olmo2ForCausalLM, PreTrainedTokenizerFast

from olmo_hf.evaluation.args import EvaluatorArgs
from olmo_hf.evaluation.encoding import encode_with
from olmo_hf.evaluation.icl import DownstreamEvaluator, DownstreamOptions
from olmo_hf.evaluation.lm_eval_tasks import write_lm_eval_tasks
from olmo_hf.evaluation.tasks.questions import read_questions
from olmo_hf.evaluation.tasks.table import find_tasks

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: pip install lm-eval")

LENGTH = 128
ROOT = Path(__file__).parents[2]

TASKS = """
capital:
  documents: countries.jsonl
  context: "Question: What is the capital of {{ country }}?\\nAnswer:"
  choices: cities
  answer: right
either:  # two contexts, one continuation
  documents: countries.jsonl
  contexts: ["{{ cities[0] }}", "{{ cities[1] }}"]
  continuations: ["is the capital of {{ country }}, or is it?"]
  answer: "0"
gold:
  like: capital
  metric: bpb
"""
COUNTRIES = [
    {"country": "France", "cities": ["Paris", "Lyon on the Rhone", "Nice"], "right": 0},
    {"country": "Norway", "cities": ["Bergen", "Oslo"], "right": 1},
    {"country": "a country whose name is far longer than the others' are", "cities": ["X", "Y", "Z"], "right": 2},
    {"country": "Japan", "cities": ["Kyoto, once", "Tokyo", "Osaka"], "right": 1},
    {"country": "Peru", "cities": ["Lima", "Cusco"], "right": 0},
] * 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model and its tokenizer, as any tool loads them."""
    place = tmp_path_factory.mktemp("checkpoint")
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|pad|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(
        [TASKS, json.dumps(COUNTRIES)],
        trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|end|>", pad_token="<|pad|>", model_max_length=LENGTH
    )
    torch.manual_seed(0)
    config = Olmo2Config(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=LENGTH,
        eos_token_id=0,
        pad_token_id=1,
    )
    model = Olmo2ForCausalLM(config)
    model.lm_head.weight.data.mul_(10)
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("tasks")
    (place / "own.yaml").write_text(TASKS)
    (place / "countries.jsonl").write_text("".join(json.dumps(line) + "\n" for line in COUNTRIES))
    return place


def harness(checkpoint: Path, batch_size: int | str) -> Any:
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(checkpoint), device="cpu", dtype="float32", batch_size=batch_size, max_batch_size=16)


def run_harness(lm: Any, folder: Path, names: list[str], **how: Any) -> dict[str, Any]:
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found = lm_eval.simple_evaluate(model=lm, tasks=names, task_manager=manager, bootstrap_iters=0, **how)
    assert found is not None
    return dict(found)


@pytest.mark.parametrize("batch_size", [1, 4, "auto"])
def test_both_say_the_same_of_the_same_documents(
    checkpoint: Path, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch_size: int | str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    labels = ("capital", "either", "gold")
    args = EvaluatorArgs(type="downstream", tasks=labels, task_files=(str(tasks / "own.yaml"),))
    write_lm_eval_tasks(args, tmp_path)
    lm = harness(checkpoint, batch_size)
    assert lm.max_length == LENGTH
    found = run_harness(lm, tmp_path, [f"olmo_{label}" for label in labels])
    model, tokenizer = lm.model, PreTrainedTokenizerFast.from_pretrained(checkpoint)
    for task in find_tasks(labels, args.task_files):
        asked = read_questions(task, answers_only=task.metric == "bpb")
        options = DownstreamOptions(max_context_tokens=LENGTH, batch_tokens=512)
        ours = DownstreamEvaluator(task.label, asked, encode_with(tokenizer), metrics=[task.metric], options=options)
        sums = ours.log_likelihoods(model, device=torch.device("cpu"), autocast=contextlib.nullcontext)
        theirs = [
            float(response[0][0])
            for sample in sorted(found["samples"][f"olmo_{task.label}"], key=lambda sample: sample["doc_id"])
            for response in sample["resps"]
        ]
        # float32 sums over up to 100 nats in batches of other shapes.
        assert sums.tolist() == pytest.approx(theirs, rel=1e-6, abs=1e-6)
        if task.metric == "acc":
            accuracy = ours.evaluate(model, device=torch.device("cpu"), autocast=contextlib.nullcontext)
            harness_accuracy = found["results"][f"olmo_{task.label}"]["acc,none"]
            assert accuracy[f"eval/downstream/{task.label}_acc"] == pytest.approx(harness_accuracy, abs=1e-6)


@pytest.mark.parametrize("batch_size", [2, "auto"])
def test_a_generation_task_from_a_local_file(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, batch_size: int | str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(ROOT)  # the path of the data is relative to it
    found = run_harness(harness(checkpoint, batch_size), ROOT / "examples" / "lm_eval", ["python_generation"], limit=4)
    samples = found["samples"]["python_generation"]
    assert len(samples) == 4
    assert all(isinstance(sample["resps"][0][0], str) for sample in samples)
    assert 0 <= found["results"]["python_generation"]["exact_match,none"] <= 1
