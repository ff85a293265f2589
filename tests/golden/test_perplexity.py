"""The original's perplexity evaluators on its own data and weights, in the mode that takes its mean."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from olmo_hf.data.args import DataArgs, SourceArgs, TokenDtype
from olmo_hf.data.build import build_eval_data
from olmo_hf.evaluation.args import EvaluationArgs, EvaluatorArgs
from olmo_hf.evaluation.build import build_evaluators
from olmo_hf.evaluation.perplexity import PerplexityEvaluator
from olmo_hf.model.modeling_olmo import OlmoHfForCausalLM
from olmo_hf.training.evaluating import Evaluator, run_evaluators
from tests.golden.native import olmo2_config, to_hf

HOME = Path(__file__).parent
RUNS = HOME / "10_trajectories"
CASES: dict[str, Any] = json.loads((HOME / "13_lm_eval" / "lm_eval.json").read_text())
MODEL: dict[str, Any] = json.loads((RUNS / "index.json").read_text())["t01_steps"]["config"]["model"]
U16: TokenDtype = "uint16"


@pytest.fixture(scope="module")
def model() -> OlmoHfForCausalLM:
    found = OlmoHfForCausalLM(olmo2_config(MODEL))
    found.load_state_dict(to_hf(load_file(RUNS / "init.safetensors")))
    return found


def paths(names: list[str]) -> tuple[str, ...]:
    return tuple(str(RUNS / name) for name in names)


def evaluator_args(case: str) -> EvaluatorArgs:
    data = CASES[case]["evaluator"]["data"]
    length = MODEL["max_sequence_length"]
    if "datasets" in data:
        sources = {name: SourceArgs(paths=paths(listed)) for name, listed in data["datasets"].items()}
        return EvaluatorArgs(
            by_source=True,
            mean_over="instances",
            data=DataArgs(sources=sources, token_dtype=U16, sequence_length=length),
        )
    masks = paths(data.get("label_mask_paths", []))
    own = DataArgs(paths=paths(data["paths"]), label_mask_paths=masks, token_dtype=U16, sequence_length=length)
    return EvaluatorArgs(label=CASES[case]["evaluator"]["label"], mean_over="instances", data=own)


def evaluate(model: OlmoHfForCausalLM, evaluators: list[Evaluator]) -> dict[str, float]:
    return run_evaluators(evaluators, model, device=torch.device("cpu"), autocast=contextlib.nullcontext)


@pytest.mark.parametrize("case", ["paths", "paths_keep_last", "datasets", "label_mask"])
def test_whole_sets(case: str, model: OlmoHfForCausalLM) -> None:
    evaluators = build_evaluators(
        EvaluationArgs(evaluators=(evaluator_args(case),)),
        eos_token_id=MODEL["eos_token_id"],
        pad_token_id=MODEL["pad_token_id"],
        vocab_size=MODEL["embedding_size"],
        per_device_eval_batch_size=50,
    )
    expected = CASES[case]["metrics"]
    found = evaluate(model, evaluators)
    assert list(found) == list(expected)
    # The original adds up in float32: its own figures for the same instances in two orders ("paths" and "zeta") are
    # 3e-7 apart, and the exponential of 6.2 makes six times that of it.
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-6 if name.endswith("CrossEntropyLoss") else 6e-6)


def test_a_part_in_the_originals_order(model: OlmoHfForCausalLM) -> None:
    args = evaluator_args("subset")
    # The original puts its sets behind each other in the order of their names.
    listed = tuple(path for name in sorted(args.data.sources) for path in args.data.sources[name].paths)
    data = DataArgs(paths=listed, token_dtype=U16, sequence_length=args.data.sequence_length)
    dataset, collate = build_eval_data(
        data, eos_token_id=MODEL["eos_token_id"], pad_token_id=MODEL["pad_token_id"], vocab_size=None
    )
    batches = CASES["subset"]["first_batches"]
    order = CASES["subset"]["instance_order"][: sum(len(batch["label"]) for batch in batches)]
    assert {label for batch in batches for label in batch["label"]} == {"zeta"}
    some = [dataset[place] for place in order]
    firsts = [tokens for batch in batches for tokens in batch["first_tokens"]]
    assert [one["input_ids"][:4].tolist() for one in some] == firsts
    one = PerplexityEvaluator("zeta", some, collate, batch_size=3, mean_over="instances")
    assert evaluate(model, [one]) == pytest.approx(CASES["subset"]["metrics"], rel=2e-6)
