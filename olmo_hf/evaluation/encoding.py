"""Questions as tokens: what a model reads for each continuation, and where it is scored."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from olmo_hf.errors import ConfigError, DataError
from olmo_hf.evaluation.tasks.questions import Question

Encode = Callable[[list[str]], list[list[int]]]
"""From texts to ids, without special tokens."""


@dataclass(frozen=True, slots=True)
class ScoredSequence:
    """What a model reads for one continuation.

    Attributes:
        tokens: context and continuation without its last token.
        first: position whose prediction is the first scored token.
        targets: the scored tokens.
        slot: where the log-likelihood goes.
    """

    tokens: np.ndarray
    first: int
    targets: np.ndarray
    slot: int


@dataclass(frozen=True)
class Encoded:
    """Sequences, and how many of them had to be cut."""

    sequences: list[ScoredSequence]
    num_truncated: int


def encode_with(tokenizer: PreTrainedTokenizerBase) -> Encode:
    """The encoding of a tokenizer, without special tokens as in the original."""
    # Data loader workers, which encode nothing, are forked later: unset, tokenizers would warn of it in each of them.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

    def encode(texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        found = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        return [list(ids) for ids in found["input_ids"]]

    return encode


def check_tokenizer(tokenizer: PreTrainedTokenizerBase | None, *, vocab_size: int | None, for_what: str) -> None:
    """Whether a tokenizer can be the model's.

    Raises:
        ConfigError: there is none, or it has ids for which the model has no row.
    """
    if tokenizer is None:
        raise ConfigError(
            f"{for_what}: tasks are text, and this run has no tokenizer; set model.tokenizer to the one of its data"
        )
    if vocab_size is not None and len(tokenizer) > vocab_size:
        raise ConfigError(
            f"{for_what}: the tokenizer {tokenizer.name_or_path!r} has {len(tokenizer):,} ids, but the model has rows "
            f"for {vocab_size:,}; use the tokenizer that belongs to the model"
        )


def empty_context_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """What stands in the place of an empty context, so that there is something to predict from."""
    return tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id


def check_questions(
    questions: Sequence[Question],
    encode: Encode,
    *,
    empty_context: int | None,
    unconditional: bool,
    for_what: str,
) -> None:
    """Whether there is something to predict from and something to predict, everywhere.

    A continuation without a token would have the best log-likelihood of all, 0, and be chosen.

    Args:
        questions: of one task.
        encode: from texts to ids.
        empty_context: id in the place of an empty context; None: there is none.
        unconditional: whether continuations are scored without the question too.
        for_what: begins the message.

    Raises:
        DataError: a continuation of which the tokenizer makes no token.
        ConfigError: a context of which it makes none, and nothing to put there.
    """
    options = [option for question in questions for option in question.options]
    without_token = _without_token([option.continuation for option in options], encode)
    for question in questions if without_token else ():
        for option in question.options:
            if option.continuation in without_token:
                raise DataError(
                    f"{for_what}: {question.where}: the tokenizer makes no token of the continuation "
                    f"{option.continuation!r}; mend the document, or use the tokenizer of the model"
                )
    if empty_context is not None:
        return
    contexts = [option.context for option in options]
    without_token = _without_token(contexts + [option.unconditional for option in options] * unconditional, encode)
    if without_token:
        raise ConfigError(
            f"{for_what} has questions whose context is {min(without_token)!r}, of which the tokenizer makes no "
            "token, and the tokenizer has no begin or end token to put there; use a tokenizer with one"
        )


def _without_token(texts: Sequence[str], encode: Encode) -> set[str]:
    return {text for text, ids in _arrays(encode, list(dict.fromkeys(texts))).items() if len(ids) == 0}


def encode_questions(
    numbered: Iterable[tuple[int, Question]],
    encode: Encode,
    *,
    max_tokens: int,
    empty_context: int | None,
    unconditional_offset: int | None = None,
) -> Encoded:
    """Context and continuation are encoded each for itself and joined, as in the original.

    A sequence longer than `max_tokens` loses its beginning; of a continuation longer than that its end is scored.

    Args:
        numbered: questions, each with the slot of its first continuation.
        encode: from texts to ids.
        max_tokens: longest sequence a model reads.
        empty_context: id in the place of an empty context.
        unconditional_offset: added to the slot of a sequence without the question, which are made too. None: not made.
    """
    listed = list(numbered)
    contexts = {option.context: 0 for _, question in listed for option in question.options}
    if unconditional_offset is not None:
        contexts |= {option.unconditional: 0 for _, question in listed for option in question.options}
    continuations = {option.continuation: 0 for _, question in listed for option in question.options}
    before = _arrays(encode, list(contexts))
    after = _arrays(encode, list(continuations))
    sequences: list[ScoredSequence] = []
    truncated = 0
    for first_slot, question in listed:
        was_cut = False
        for place, option in enumerate(question.options):
            variants = [(option.context, first_slot + place)]
            if unconditional_offset is not None:
                variants.append((option.unconditional, first_slot + place + unconditional_offset))
            for text, slot in variants:
                context = before[text]
                if len(context) == 0:
                    assert empty_context is not None, "looked at when the evaluator is built"
                    context = np.array([empty_context], dtype=np.int32)
                targets = after[option.continuation][-max_tokens:]
                tokens = np.concatenate([context, after[option.continuation][:-1]])
                was_cut |= len(tokens) > max_tokens
                tokens = tokens[-max_tokens:]
                sequences.append(ScoredSequence(tokens, len(tokens) - len(targets), targets, slot))
        truncated += was_cut
    return Encoded(sequences, truncated)


def _arrays(encode: Encode, texts: Sequence[str]) -> dict[str, np.ndarray]:
    return {text: np.array(ids, dtype=np.int32) for text, ids in zip(texts, encode(list(texts)), strict=True)}
