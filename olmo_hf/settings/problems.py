"""Problems of a configuration, gathered so that a person sees all of them at once."""

import difflib
from collections.abc import Iterable
from typing import Any

_LONGEST_SHOWN = 60


class Problems:
    """Sentences for people, each tied to the key it is about.

    Attributes:
        sentences: what is printed, in the order found.
        keys: dotted keys that have a problem; a check on a value that could not even be read is left out.
    """

    def __init__(self) -> None:
        self.sentences: list[str] = []
        self.keys: set[str] = set()

    def add(self, key: str, sentence: str) -> None:
        """Notes a problem once; `sentence` names the key, the value found, what was expected and the remedy."""
        self.keys.add(key)
        # A key may hold line breaks and what terminals take for commands.
        sentence = "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in sentence)
        if sentence not in self.sentences:
            self.sentences.append(sentence)

    def touches(self, keys: Iterable[str]) -> bool:
        """Whether one of these keys, a part of it, or the block around it already has a problem."""
        return any(
            known == key or known.startswith((f"{key}.", f"{key}[")) or key.startswith(f"{known}.")
            for key in keys
            for known in self.keys
        )


def shown(value: Any) -> str:
    """A value as a person would recognise it from the file, cut to a line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    try:
        text = repr(value)
    except ValueError:  # Python does not write out whole numbers of thousands of digits
        return "a number too long to write out"
    return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 3]}..."


def nearest(word: str, words: Iterable[str]) -> str | None:
    """The word that was probably meant, or None."""
    found = difflib.get_close_matches(word, list(words), n=1, cutoff=0.6)
    return found[0] if found else None
