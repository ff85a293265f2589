"""From the `evaluation` section to evaluators."""

from collections.abc import Iterator
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from olmo_hf.data.build import build_eval_data
from olmo_hf.errors import ConfigError
from olmo_hf.evaluation.args import EvaluationArgs, EvaluatorArgs, evaluation_problems, task_labels
from olmo_hf.evaluation.bytes_per_token import bytes_per_token_of
from olmo_hf.evaluation.encoding import check_questions, check_tokenizer, empty_context_token, encode_with
from olmo_hf.evaluation.icl import DownstreamEvaluator, DownstreamOptions
from olmo_hf.evaluation.perplexity import PerplexityEvaluator
from olmo_hf.evaluation.tasks.questions import ANSWER_METRICS, read_questions
from olmo_hf.evaluation.tasks.table import find_tasks
from olmo_hf.training.evaluating import Evaluator


def build_evaluators(
    args: EvaluationArgs,
    *,
    eos_token_id: int | None,
    pad_token_id: int | None,
    vocab_size: int | None,
    per_device_eval_batch_size: int,
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_position_embeddings: int | None = None,
) -> list[Evaluator]:
    """Evaluators in the order of the configuration.

    Args:
        args: the section.
        eos_token_id, pad_token_id, vocab_size: of the model.
        per_device_eval_batch_size: instances of a forward pass; tasks are packed to as many tokens.
        tokenizer: of the model, for tasks.
        max_position_embeddings: longest sequence that the model reads.

    Raises:
        ConfigError: a label is missing, unknown or used twice, a number is out of range, or there is no tokenizer that
            fits; all problems at once.
        DataError: token files or tasks that cannot be read.
    """
    problems = evaluation_problems(args)
    if problems:
        raise ConfigError(problems)
    evaluators: list[Evaluator] = []
    vocabulary = {"eos_token_id": eos_token_id, "pad_token_id": pad_token_id, "vocab_size": vocab_size}
    for place, one in enumerate(args.evaluators):
        if one.type == "perplexity":
            evaluators += [
                _perplexity(each, vocabulary, batch_size=per_device_eval_batch_size) for each in _per_source(one)
            ]
            continue
        for_what = f"evaluation.evaluators[{place}]"
        check_tokenizer(tokenizer, vocab_size=vocab_size, for_what=for_what)
        assert tokenizer is not None
        longest = one.max_context_tokens
        if max_position_embeddings is not None:
            longest = min(longest, max_position_embeddings)
        options = DownstreamOptions(
            max_context_tokens=longest,
            batch_tokens=per_device_eval_batch_size * longest,
            empty_context=empty_context_token(tokenizer),
        )
        evaluators += _downstream(one, tokenizer, options, for_what)
    return evaluators


def _per_source(one: EvaluatorArgs) -> Iterator[EvaluatorArgs]:
    """The evaluator itself, or one for each of its sources, in alphabetical order as sources always are."""
    if not one.by_source:
        yield one
        return
    for name, source in sorted(one.data.sources.items()):
        data = replace(one.data, sources={}, paths=source.paths, label_mask_paths=source.label_mask_paths)
        yield replace(one, label=name, by_source=False, data=data)


def _perplexity(one: EvaluatorArgs, vocabulary: dict[str, int | None], *, batch_size: int) -> PerplexityEvaluator:
    dataset, collator = build_eval_data(
        one.data,
        eos_token_id=vocabulary["eos_token_id"],
        pad_token_id=vocabulary["pad_token_id"],
        vocab_size=vocabulary["vocab_size"],
    )
    ratio = one.bytes_per_token
    return PerplexityEvaluator(
        one.label,
        dataset,
        collator,
        batch_size=batch_size,
        max_instances=one.max_instances,
        mean_over=one.mean_over,
        bytes_per_token=ratio if ratio is not None else bytes_per_token_of(dataset.paths),
    )


def _downstream(
    one: EvaluatorArgs, tokenizer: PreTrainedTokenizerBase, options: DownstreamOptions, for_what: str
) -> Iterator[DownstreamEvaluator]:
    try:
        tasks = find_tasks(task_labels(one), one.task_files)
    except ConfigError as error:
        raise ConfigError([f"{for_what}: {problem}" for problem in error.problems]) from error
    for task in tasks:
        metrics = one.metrics if one.metrics else (task.metric,)
        questions = read_questions(
            task,
            task_data=one.task_data,
            max_questions=one.max_instances,
            answers_only=all(metric in ANSWER_METRICS for metric in metrics),
        )
        encode = encode_with(tokenizer)
        check_questions(
            questions,
            encode,
            empty_context=options.empty_context,
            unconditional="pmi_dc" in metrics,
            for_what=f"{for_what}: task {task.label}",
        )
        yield DownstreamEvaluator(task.label, questions, encode, metrics=metrics, options=options)
