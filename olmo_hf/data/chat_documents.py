"""Conversations as documents: tokens, and which of them are learned.

Shapes: `T` tokens of a conversation.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from jinja2 import TemplateError
from tokenizers import Tokenizer

from olmo_hf.data.document_sources import BadDocumentError
from olmo_hf.data.tokenizer_files import TokenizerFiles, chat_template_of

DEFAULT_CHAT_TEMPLATE = (
    "{{ eos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>\n' }}"
    "{% if message['role'] == 'assistant' %}{{ message['content'] | trim + eos_token + '\n' }}"
    "{% else %}{{ message['content'] | trim + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
"""Used when a tokenizer has none of its own: the layout of the original's fine-tuning data."""


@dataclass(frozen=True)
class Conversation:
    """A rendered conversation.

    Attributes:
        text: All of it.
        learned: Stretches of characters the assistant says, `[start, end)`.
    """

    text: str
    learned: tuple[tuple[int, int], ...]


class ChatEncoder:
    """Renders conversations with a chat template and flags what the assistant says.

    Learned is every token that begins inside an assistant's turn: from where it starts to speak to the end-of-text
    token with which it stops; white space that the template puts behind a turn is not.

    Args:
        files: The saved tokenizer, whose chat template is used if it has one.
        tokenizer: The same, loaded.
    """

    def __init__(self, files: TokenizerFiles, tokenizer: Tokenizer):
        from transformers import AutoTokenizer

        self._eos_token_id = files.eos_token_id
        self._tokenizer = tokenizer
        self._auto = AutoTokenizer.from_pretrained(files.folder)
        own = chat_template_of(files.folder)
        self._template = DEFAULT_CHAT_TEMPLATE if own is None else own

    def render(self, messages: Any, place: str) -> Conversation:
        """The text of a conversation.

        Args:
            messages: A list of `{"role": ..., "content": ...}`.
            place: Where it stands, for messages.

        Raises:
            BadDocumentError: It is no conversation, nothing in it is learned, or the template cannot render it.
        """
        if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
            raise BadDocumentError(f"{place}: expected a list of messages with role and content")
        if not any(message.get("role") == "assistant" for message in messages):
            raise BadDocumentError(f"{place}: has no assistant message, so nothing is learned from it")
        try:
            text = self._text(messages)
            learned = tuple(
                self._spoken(messages, number, text, place)
                for number, message in enumerate(messages)
                if message["role"] == "assistant"
            )
        except (KeyError, TypeError, ValueError, TemplateError) as error:
            raise BadDocumentError(f"{place}: cannot be rendered ({error!r})") from error
        return Conversation(text, learned)

    def _spoken(self, messages: list[dict[str, Any]], number: int, text: str, place: str) -> tuple[int, int]:
        """Where in the text an assistant's message begins and ends."""
        if not isinstance(messages[number].get("content"), str):
            raise BadDocumentError(f"{place}: the content of an assistant's message must be text")
        until = self._text(messages[: number + 1])
        if not text.startswith(until):
            raise BadDocumentError(f"{place}: the chat template renders earlier turns anew with every turn")
        if number == 0:
            # Templates refuse to render no message at all.
            return text.index(messages[0]["content"].strip()), len(until.rstrip())
        return len(self._text(messages[:number], add_generation_prompt=True)), len(until.rstrip())

    def _text(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = False) -> str:
        return str(
            self._auto.apply_chat_template(
                messages, chat_template=self._template, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        )

    def encode(self, conversation: Conversation) -> tuple[np.ndarray, np.ndarray]:
        """Tokens, uint32 (T,), and label flags, bool (T,).

        The last token is the end of text; if the template does not put it there it is added, and learned.
        """
        encoding = self._tokenizer.encode(conversation.text, add_special_tokens=False)
        ids = list(encoding.ids)
        flags = [any(start <= begin < end for start, end in conversation.learned) for begin, _ in encoding.offsets]
        # White space behind the last turn belongs to a layout that continues; here the document ends.
        while ids and ids[-1] != self._eos_token_id and not flags[-1]:
            if self._tokenizer.decode([ids[-1]]).strip():
                break
            ids.pop()
            flags.pop()
        if not ids or ids[-1] != self._eos_token_id:
            ids.append(self._eos_token_id)
            flags.append(bool(flags) and flags[-1])
        return np.array(ids, np.uint32), np.array(flags, np.bool_)
