"""Batches of documents into batches of tokens, here or in other processes, always in the order they came.

Shapes: `T` tokens of a batch, `D` documents in it.
"""

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field

import numpy as np
from tokenizers import Tokenizer

from olmo_hf.data.chat_documents import ChatEncoder
from olmo_hf.data.document_sources import BadDocumentError, DocumentBatch, in_validation, read_document
from olmo_hf.data.tokenizer_files import TokenizerFiles, raw_tokenizer
from olmo_hf.errors import DataError


@dataclass
class EncodedBatch:
    """The documents of a batch as tokens, each ended by one end-of-text token.

    Attributes:
        number: Number of the batch.
        tokens: All documents one after the other, uint32, shape (T,).
        lengths: Tokens of each, int64, shape (D,).
        validation: Whether each belongs to the validation split, bool, shape (D,).
        label_mask: Label flag of every token, bool, shape (T,). None: plain text.
        num_empty: Documents without any text; they give no tokens.
        bad: What is wrong with those that could not be used.
        size_bytes: Size of the batch in the sources.
        text_bytes: Length of each document's text in UTF-8, int64, shape (D,).
    """

    number: int
    tokens: np.ndarray
    lengths: np.ndarray
    validation: np.ndarray
    label_mask: np.ndarray | None = None
    num_empty: int = 0
    bad: list[str] = field(default_factory=list)
    size_bytes: int = 0
    text_bytes: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))


@dataclass(frozen=True)
class EncoderSettings:
    """What turns documents into tokens.

    Attributes:
        tokenizer: The saved tokenizer.
        column: Field of the text or the messages.
        messages: Documents are conversations; their tokens get label flags.
        validation_fraction: Share of the documents that goes to the validation split.
    """

    tokenizer: TokenizerFiles
    column: str
    messages: bool
    validation_fraction: float


class BatchEncoder:
    """Encodes batches, one after the other, in one process."""

    def __init__(self, settings: EncoderSettings):
        self.settings = settings
        self._tokenizer: Tokenizer = raw_tokenizer(settings.tokenizer.folder)
        self._chat = ChatEncoder(settings.tokenizer, self._tokenizer) if settings.messages else None
        if self._chat is None:
            # A document that spells out a special token means the text, not the token: no document ends early.
            self._tokenizer.encode_special_tokens = True

    def __call__(self, batch: DocumentBatch) -> EncodedBatch:
        """Reads, parses and encodes a batch. What is bad in it is told, never raised."""
        texts, bad, num_empty = [], [], 0
        conversations = []
        for content, place in zip(batch.contents, batch.places, strict=True):
            try:
                value = read_document(batch.kind, content, place, self.settings.column)
                if self._chat is not None:
                    conversation = self._chat.render(value, place)
                    conversations.append(conversation)
                    texts.append(conversation.text)
                elif not isinstance(value, str):
                    raise BadDocumentError(f"{place}: {self.settings.column!r} is no text but {type(value).__name__}")
                elif value.strip():
                    texts.append(value)
                else:
                    num_empty += 1
            except BadDocumentError as error:
                bad.append(str(error))
        pieces, masks = [], None
        if self._chat is None:
            eos = self.settings.tokenizer.eos_token_id
            for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False):
                pieces.append(np.array([*encoding.ids, eos], np.uint32))
        else:
            encoded = [self._chat.encode(conversation) for conversation in conversations]
            pieces = [tokens for tokens, _ in encoded]
            masks = np.concatenate([mask for _, mask in encoded]) if encoded else np.empty(0, np.bool_)
        fraction = self.settings.validation_fraction
        return EncodedBatch(
            number=batch.number,
            tokens=np.concatenate(pieces) if pieces else np.empty(0, np.uint32),
            lengths=np.array([piece.size for piece in pieces], np.int64),
            validation=np.array([in_validation(text, fraction) for text in texts], np.bool_),
            label_mask=masks,
            num_empty=num_empty,
            bad=bad,
            size_bytes=batch.size_bytes,
            text_bytes=np.array([len(text.encode("utf-8", "replace")) for text in texts], np.int64),
        )


def encode_batches(
    batches: Iterable[DocumentBatch], settings: EncoderSettings, *, num_workers: int
) -> Iterator[EncodedBatch]:
    """Encodes batches in their order; the result does not depend on `num_workers`.

    Args:
        batches: What to encode.
        settings: How.
        num_workers: Processes. 0: this one, in which the tokenizer itself uses all cores.

    Raises:
        DataError: A process died.
    """
    if num_workers == 0:
        yield from map(BatchEncoder(settings), batches)
        return
    # Forking a process in which a tokenizer has run threads can hang; a fork server has run none.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    waiting: deque[Future[EncodedBatch]] = deque()
    with ProcessPoolExecutor(num_workers, context, _start_worker, (settings,)) as pool:
        try:
            for batch in batches:
                waiting.append(pool.submit(_encode_in_worker, batch))
                # Few batches wait at a time: memory stays bounded, however fast the sources are read.
                if len(waiting) > 2 * num_workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            raise DataError(
                "a worker process ended without a word (often: out of memory); run the same command again to "
                "continue, with fewer --num-workers"
            ) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


_encoder: BatchEncoder | None = None


def _start_worker(settings: EncoderSettings) -> None:
    global _encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _encoder = BatchEncoder(settings)


def _end_with_parent() -> None:
    """Ends this worker when the process that started it is gone, even if that was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode_in_worker(batch: DocumentBatch) -> EncodedBatch:
    assert _encoder is not None
    return _encoder(batch)
