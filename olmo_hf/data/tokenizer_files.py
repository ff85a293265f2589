"""The tokenizer of a preparation: trained or taken over, saved so that every reader gets the same ids."""

import json
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from olmo_hf.data.manifest import file_sha256
from olmo_hf.errors import DataError

logger = logging.getLogger(__name__)

EOS_TOKEN = "<|endoftext|>"
PAD_TOKEN = "<|padding|>"

WORD_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
"""Where text is cut before byte pairs are merged: the scheme of OLMo-2's vocabulary (digits in threes)."""

TRICKY_TEXTS = (
    "def f(x):\n    return x**2  # ok\n",
    "1234567890 3.14159 1,000,000",
    "><\n\n><\n",
    "don't DON'T I'LL we've",
    "  two  spaces  and trailing   ",
    "\t\ttabs\tinside",
    "\r\nwindows\r\nlines",
    "caf\u00e9 cafe\u0301 \u00c5ngstr\u00f6m",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "\u65e5\u672c\u8a9e\u306e\u6587\u7ae0",
    "\u0645\u0631\u062d\u0628\u0627",
    "a_b-c.d/e\\f|g",
    "http://example.org/?q=1&r=%20",
    '{"json": [1, 2, {"x": null}]}',
    "<html><body></body></html>",
    "x=1;y=2;z=3",
    "\n\n\n",
    " leading",
    "ALLCAPS camelCase snake_case",
    "\u00a0no-break\u2003em space",
)
"""Strings on which two readings of one tokenizer tend to differ."""


@dataclass(frozen=True)
class TokenizerFiles:
    """A saved tokenizer.

    Attributes:
        folder: Where it is.
        vocab_size: Number of ids, added tokens included.
        eos_token_id: Id that ends a document.
        pad_token_id: Padding id, if it has one.
        sha256: Checksum of `tokenizer.json`.
    """

    folder: str
    vocab_size: int
    eos_token_id: int
    pad_token_id: int | None
    sha256: str


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """Byte-level byte-pair encoding of `vocab_size` entries, and before them end of text (id 0) and padding (id 1).

    Any text can be encoded and comes back unchanged. The same texts give the same tokenizer.
    """
    special_tokens = [EOS_TOKEN, PAD_TOKEN]
    smallest = len(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size < smallest:
        raise DataError(f"--train-tokenizer: found {vocab_size}, expected {smallest} or more (every byte is a token)")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size + len(special_tokens),
        special_tokens=special_tokens,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(
    tokenizer: Tokenizer, folder: str | os.PathLike[str], **special_tokens: str | None
) -> TokenizerFiles:
    """Saves a tokenizer so that `AutoTokenizer` gives the same ids as its `tokenizer.json`, and checks that it does.

    Args:
        tokenizer: The tokenizer itself.
        folder: Where to.
        special_tokens: `eos_token`, `pad_token`, `chat_template`, ... as `PreTrainedTokenizerFast` takes them.
    """
    from transformers import PreTrainedTokenizerFast

    given = {name: value for name, value in special_tokens.items() if value is not None}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **given).save_pretrained(folder)
    return read_tokenizer(folder)


def read_tokenizer(folder: str | os.PathLike[str]) -> TokenizerFiles:
    """Looks at a saved tokenizer and checks that both ways of reading it agree.

    Raises:
        DataError: There is no end-of-text token, or `AutoTokenizer` encodes otherwise than `tokenizer.json`.
    """
    from transformers import AutoTokenizer

    raw = raw_tokenizer(folder)
    auto = AutoTokenizer.from_pretrained(folder)
    differing = differing_texts(raw, auto)
    if differing:
        raise DataError(
            f"{folder}: AutoTokenizer and tokenizer.json disagree on {differing[0]!r}; the tokenizer_class in "
            "tokenizer_config.json rebuilds it otherwise. Save it as PreTrainedTokenizerFast"
        )
    eos_token_id = None if auto.eos_token is None else raw.token_to_id(auto.eos_token)
    if eos_token_id is None:
        raise DataError(f"{folder}: names no end-of-text token; say which of its tokens it is with --eos-token")
    return TokenizerFiles(
        folder=str(folder),
        vocab_size=len(auto),
        eos_token_id=eos_token_id,
        pad_token_id=None if auto.pad_token is None else raw.token_to_id(auto.pad_token),
        sha256=file_sha256(Path(folder) / "tokenizer.json"),
    )


def raw_tokenizer(folder: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer as its `tokenizer.json` says it: what training data are encoded with."""
    return Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))


def _from_file(path: str) -> Tokenizer:
    try:
        return Tokenizer.from_file(path)
    except Exception as error:  # the library raises nothing more particular
        raise DataError(f"{path}: is no tokenizer.json ({error}); give the one of a fast tokenizer") from error


def differing_texts(raw: Tokenizer, auto: object) -> list[str]:
    """Of the tricky texts, those that two readings of a tokenizer encode differently."""
    return [
        text
        for text in TRICKY_TEXTS
        if auto(text, add_special_tokens=False)["input_ids"]  # type: ignore[operator]
        != raw.encode(text, add_special_tokens=False).ids
    ]


def take_over_tokenizer(source: str, folder: str | os.PathLike[str], *, eos_token: str | None) -> TokenizerFiles:
    """Copies a tokenizer (a directory, a `tokenizer.json`, or a name on the hub) into the prepared data.

    Its `tokenizer.json` decides; special tokens and chat template come from the files beside it.

    Args:
        source: The tokenizer.
        folder: Where to.
        eos_token: Which token ends a document, if the tokenizer does not say it or says it wrongly.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if source.endswith(".json"):
        raw = _from_file(source)
        return save_tokenizer(raw, folder, eos_token=_known(raw, eos_token, source))
    if os.path.isdir(source) and os.path.realpath(source) == os.path.realpath(folder):
        return read_tokenizer(folder)
    try:
        auto = AutoTokenizer.from_pretrained(source)
        path = _tokenizer_json(source)
    except (OSError, ValueError) as error:
        raise DataError(
            f"--tokenizer: none can be loaded from {source} ({str(error).splitlines()[0]}); name a directory with a "
            "tokenizer.json, such a file, or a name on the hub"
        ) from error
    raw = auto.backend_tokenizer if path is None else _from_file(path)
    if differing_texts(raw, auto):
        logger.warning("%s: AutoTokenizer reads it otherwise than its tokenizer.json; the latter is used", source)
        names = ("bos_token", "eos_token", "unk_token", "pad_token")
        special = {name: getattr(auto, name) for name in names if getattr(auto, name, None) is not None}
        auto = PreTrainedTokenizerFast(tokenizer_object=raw, chat_template=auto.chat_template, **special)
    if eos_token is not None:
        auto.eos_token = _known(raw, eos_token, source)
    auto.save_pretrained(folder)
    return read_tokenizer(folder)


def _known(raw: Tokenizer, token: str | None, source: str) -> str | None:
    if token is not None and raw.token_to_id(token) is None:
        raise DataError(
            f"--eos-token: {token!r} is no token of {source}; name one that is, as its tokenizer.json writes it"
        )
    return token


def _tokenizer_json(source: str) -> str | None:
    """Path of the `tokenizer.json` of a directory or a hub name, if it has one."""
    from transformers.utils import cached_file

    if os.path.isdir(source):
        path = os.path.join(source, "tokenizer.json")
        return path if os.path.isfile(path) else None
    return cached_file(source, "tokenizer.json", _raise_exceptions_for_missing_entries=False)


def chat_template_of(folder: str | os.PathLike[str]) -> str | None:
    """The chat template saved with a tokenizer."""
    beside = Path(folder) / "chat_template.jinja"
    if beside.is_file():
        return beside.read_text(encoding="utf-8")
    config = Path(folder) / "tokenizer_config.json"
    template = json.loads(config.read_text(encoding="utf-8")).get("chat_template") if config.is_file() else None
    return template if isinstance(template, str) else None
