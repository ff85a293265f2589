"""Documents and requests as questions: contexts, continuations, and which of these is right."""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jinja2 import StrictUndefined, TemplateError, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from olmo_hf.errors import DataError
from olmo_hf.evaluation.tasks.sources import Located, read_documents, read_requests
from olmo_hf.evaluation.tasks.table import Task

ANSWER_METRICS = ("ce_loss", "bpb")
"""Metrics of the right continuation alone; the others compare."""

_UNCONDITIONAL_IDS = 1_000_000
"""Requests numbered from here on are those of the document so many less, without its context."""


@dataclass(frozen=True, slots=True)
class Option:
    """One continuation of a question."""

    context: str
    continuation: str
    """With what separates it from the context."""

    num_characters: int
    """Length of the continuation, the separator not counted."""

    num_bytes: int
    """The same in UTF-8."""

    unconditional: str
    """What stands in the place of the context for `pmi_dc`."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is counted once: a document in one variant of its prompt."""

    options: tuple[Option, ...]
    answer: int
    where: str


def read_questions(
    task: Task, *, task_data: str | None = None, max_questions: int | None = None, answers_only: bool = False
) -> list[Question]:
    """The questions of a task in their order.

    Args:
        task: from the table.
        task_data: directory with the data of shipped tasks; None: those of installed packages.
        max_questions: only the first so many. None: all.
        answers_only: leave the wrong continuations out, for metrics that do not look at them.

    Raises:
        DataError: what a person must mend in file or task, with its place; also when there is no question at all.
    """
    found = _from_requests(task, task_data) if task.requests else _from_documents(task, task_data)
    questions = list(itertools.islice(found, max_questions))
    if not questions:
        raise DataError(
            f"task {task.label}: there is not a single question in {task.requests or task.documents}; name a file "
            "with some"
        )
    if answers_only:
        questions = [_right_only(question) for question in questions]
    return questions


def _right_only(question: Question) -> Question:
    return Question((question.options[question.answer],), 0, question.where)


def _option(context: str, continuation: str, separated_by: int, unconditional: str, where: str) -> Option:
    bare = continuation[separated_by:]
    if not bare:
        raise DataError(f"{where}: the continuation is empty; there is nothing to predict: mend the document")
    return Option(context, continuation, len(bare), len(bare.encode("utf-8", errors="replace")), unconditional)


# Documents


def _clean_wikihow(text: str) -> str:
    """Text without the marks of its source, as the original has it for HellaSwag; once over, not to a fixed point."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def _detokenize(text: str) -> str:
    """Tokenised English with its spaces put right, as the original does it for GLUE."""
    for wrong, right in ((" n't", "n't"), (" )", ")"), ("( ", "("), ('" ', '"'), (' "', '"')):
        text = text.replace(wrong, right)
    return re.sub(r" ([.,'])", r"\1", text)


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
    environment.filters |= {
        "clean_wikihow": _clean_wikihow,
        "detokenize": _detokenize,
        "lower_first": _lower_first,
    }
    return environment


Rendered = Callable[[Mapping[str, Any]], Any]


class _Prompt:
    """The templates of a task, compiled."""

    def __init__(self, task: Task):
        self._task = task
        self._environment = _environment()
        self.contexts = [self._template(text) for text in task.contexts or (task.context,)]
        self.unconditionals = [self._template(text) for text in task.unconditionals or (task.unconditional,)]
        self.continuations = [self._template(text) for text in task.continuations]
        self.choices = self._expression("choices", task.choices) if task.choices else None
        self.answer = self._expression("answer", task.answer)

    @cached_property
    def instruction(self) -> Rendered:
        return self._template(self._task.instruction)

    def _template(self, text: str) -> Rendered:
        try:
            return self._environment.from_string(text).render
        except TemplateError as error:
            raise DataError(
                f"task {self._task.label}: {text!r} is no template ({error}); correct it, in the syntax of Jinja"
            ) from error

    def _expression(self, name: str, text: str) -> Rendered:
        try:
            compiled = self._environment.compile_expression(text, undefined_to_none=False)
        except TemplateError as error:
            raise DataError(
                f"task {self._task.label}: {name} is {text!r}, which is no expression ({error}); correct it, in the "
                "syntax of Jinja, without braces"
            ) from error

        def evaluate(fields: Mapping[str, Any]) -> Any:
            value = compiled(**fields)
            if isinstance(value, Undefined):
                value._fail_with_undefined_error()
            return value

        return evaluate

    def continuations_of(self, fields: Mapping[str, Any]) -> list[str]:
        if self.choices is None:
            return [render(fields) for render in self.continuations]
        listed = self.choices(fields)
        if not isinstance(listed, list | tuple) or not listed:
            raise ValueError(f"`choices` gives {listed!r}, expected a list of texts")
        if not all(isinstance(one, str) for one in listed):
            raise ValueError(f"`choices` gives {listed!r}; every one must be a text")
        return list(listed)

    def answer_of(self, fields: Mapping[str, Any], num_options: int) -> int:
        place = self.answer(fields)
        if isinstance(place, bool) or not isinstance(place, int):
            raise ValueError(f"`answer` gives {place!r}, expected the place of the right continuation as a number")
        if not 0 <= place < num_options:
            raise ValueError(f"`answer` gives {place}, but there are {num_options} choices, counted from 0")
        return place

    def question(self, fields: Mapping[str, Any], before: str, where: str) -> Question:
        """One document; `before` stands before its contexts."""
        separator = self._task.separator
        contexts = [before + render(fields) for render in self.contexts]
        continuations = self.continuations_of(fields)
        count = max(len(contexts), len(continuations))
        unconditionals = [render(fields) for render in self.unconditionals]
        options = tuple(
            _option(
                contexts[place if len(contexts) > 1 else 0],
                separator + continuations[place if len(continuations) > 1 else 0],
                len(separator),
                unconditionals[place if len(unconditionals) > 1 else 0],
                where,
            )
            for place in range(count)
        )
        return Question(options, self.answer_of(fields, count), where)

    def example(self, fields: Mapping[str, Any]) -> str:
        """A document with its answer, as it stands before a question."""
        continuations = self.continuations_of(fields)
        right = continuations[self.answer_of(fields, len(continuations))]
        return f"{self.contexts[0](fields)}{self._task.separator}{right}\n\n"


def _from_documents(task: Task, task_data: str | None) -> Iterator[Question]:
    prompt = _Prompt(task)
    for member in task.each or ("",):
        filled = {"split": task.split, "each": member}
        examples: list[Located] = []
        most = max((shots for shots in task.shots if shots is not None), default=0)
        if most:
            name = _filled(task.examples, filled)
            examples = list(itertools.islice(read_documents(task, name, task_data), most))
            if len(examples) < most:
                raise DataError(
                    f"task {task.label}: shots asks for {most} examples, and {name} has {len(examples)}; lower shots "
                    "or add examples"
                )
        for document in read_documents(task, _filled(task.documents, filled), task_data):
            for shots in task.shots:
                try:
                    before = "" if shots is None else prompt.instruction(document.fields)
                    before += "".join(prompt.example(one.fields) for one in examples[: 0 if shots is None else shots])
                    yield prompt.question(document.fields, before, document.where)
                except (TemplateError, SecurityError, ValueError, TypeError, AttributeError, KeyError) as error:
                    raise DataError(f"task {task.label}: {document.where}: {error}; mend it or the task") from error


def _filled(name: str, filled: Mapping[str, str]) -> str:
    for key, value in filled.items():
        name = name.replace("{" + key + "}", value)
    return name


# Requests


def _from_requests(task: Task, task_data: str | None) -> Iterator[Question]:
    """Requests of one document follow one another; those without its context come anywhere."""
    documents: dict[int, dict[int, Located]] = {}
    unconditional: dict[tuple[int, int], str] = {}
    for request in read_requests(task, task_data):
        document, place = _numbers(request)
        request.fields.pop("doc", None)  # long, and not needed
        if document >= _UNCONDITIONAL_IDS:
            unconditional[document - _UNCONDITIONAL_IDS, place] = _text(request, "context")
        else:
            # The first of several alike counts, as in the original.
            documents.setdefault(document, {}).setdefault(place, request)
    for document, requests in documents.items():
        yield _question_of_requests(task, document, requests, unconditional)


def _question_of_requests(
    task: Task, document: int, requests: Mapping[int, Located], unconditional: Mapping[tuple[int, int], str]
) -> Question:
    first = next(iter(requests.values()))
    if sorted(requests) != list(range(len(requests))):
        raise DataError(
            f"{first.where}: the continuations of document {document} are numbered {sorted(requests)}; expected "
            f"0 to {len(requests) - 1}: add those that are missing"
        )
    label = first.fields.get("label")
    # A text, a list of texts or nothing: what is there is the gold answer.
    answer = label if isinstance(label, int) and not isinstance(label, bool) else 0
    if not 0 <= answer < len(requests):
        raise DataError(
            f"{first.where}: label is {answer}, but document {document} has {len(requests)} continuations, counted "
            "from 0; correct the label or add continuations"
        )
    options = []
    for place in range(len(requests)):
        request = requests[place]
        continuation = _text(request, "continuation")
        if not continuation:
            raise DataError(f"{request.where}: the continuation is empty; there is nothing to predict: mend the file")
        # The original never counts the first character, which is a space nearly always.
        separated_by = 1 if len(continuation) > 1 else 0
        aside = unconditional.get((document, place), task.unconditional)
        options.append(_option(_text(request, "context"), continuation, separated_by, aside, request.where))
    return Question(tuple(options), answer, first.where)


def _numbers(request: Located) -> tuple[int, int]:
    kind = request.fields.get("request_type", "loglikelihood")
    if kind not in ("loglikelihood", "generate_until_and_loglikelihood"):
        raise DataError(f"{request.where}: request_type is {kind!r}, expected loglikelihood; remove the request")
    document, place = request.fields.get("doc_id"), request.fields.get("idx", 0)
    if not isinstance(document, int) or not isinstance(place, int) or document < 0 or place < 0:
        raise DataError(
            f"{request.where}: doc_id is {document!r} and idx is {place!r}; expected the numbers of the document "
            "and of the continuation"
        )
    return document, place


def _text(request: Located, name: str) -> str:
    inner = request.fields.get("request")
    value = inner.get(name) if isinstance(inner, dict) else None
    if not isinstance(value, str):
        raise DataError(f"{request.where}: request.{name} is {value!r}, expected text")
    return value
