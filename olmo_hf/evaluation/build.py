"""From the `evaluation` section to evaluators."""

from olmo_hf.data.build import build_eval_data
from olmo_hf.errors import ConfigError
from olmo_hf.evaluation.args import EvaluationArgs, evaluation_problems
from olmo_hf.evaluation.perplexity import PerplexityEvaluator
from olmo_hf.training.evaluating import Evaluator


def build_evaluators(
    args: EvaluationArgs,
    *,
    eos_token_id: int | None,
    pad_token_id: int | None,
    vocab_size: int | None,
    per_device_eval_batch_size: int,
) -> list[Evaluator]:
    """Evaluators in the order of the configuration.

    Raises:
        ConfigError: a label is missing or used twice, or a number is out of range; all problems at once.
        DataError: token files that cannot be read.
    """
    problems = evaluation_problems(args)
    if problems:
        raise ConfigError(problems)
    evaluators: list[Evaluator] = []
    for one in args.evaluators:
        dataset, collator = build_eval_data(
            one.data, eos_token_id=eos_token_id, pad_token_id=pad_token_id, vocab_size=vocab_size
        )
        evaluators.append(
            PerplexityEvaluator(
                one.label,
                dataset,
                collator,
                batch_size=per_device_eval_batch_size,
                max_instances=one.max_instances,
                mean_over=one.mean_over,
                bytes_per_token=one.bytes_per_token,
            )
        )
    return evaluators
