"""Named data mixes: the files of published runs in their published order, as text lists in `mixes/`.

The order of the files numbers the instances and so decides the order of the whole run; a list is a fact to be kept,
not a set. A line names one file or, as in a shell, several: `part-{00..15}.npy` counts, `part-{3,1,2}.npy` chooses;
with two braces the last one varies fastest. Lines that begin with `@` say what is known of the mix, `#` is a comment.
"""

import functools
import itertools
import re
from dataclasses import dataclass
from pathlib import Path

from olmo_hf.errors import DataError

HOME = Path(__file__).parent / "mixes"

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


@dataclass(frozen=True)
class NamedMix:
    """A published list of token files.

    Attributes:
        name: Name of the list.
        relative_paths: Its files below a base, repetitions kept.
        base: Where the files are published; a bucket or a directory with the same tree will do as well.
        token_dtype: Type of a token.
        num_tokens: Tokens of all files together, as far as published figures tell.
    """

    name: str
    relative_paths: tuple[str, ...]
    base: str
    token_dtype: str
    num_tokens: int

    def paths(self, base: str | None = None) -> list[str]:
        """The files below `base`, or where they are published."""
        start = (self.base if base is None else base).rstrip("/")
        return [f"{start}/{path}" for path in self.relative_paths]


def mix_names() -> list[str]:
    """Names of all mixes."""
    return sorted(path.stem for path in HOME.glob("*.txt"))


@functools.cache
def read_mix(name: str) -> NamedMix:
    """One mix.

    Raises:
        DataError: no mix has this name; the message lists those that exist.
    """
    if name not in mix_names():
        raise DataError(f"data.mix: found {name!r}, expected one of {', '.join(mix_names())}")
    known: dict[str, str] = {}
    paths: list[str] = []
    for line in (HOME / f"{name}.txt").read_text(encoding="utf-8").splitlines():
        text = line.partition("#")[0].strip()
        if text.startswith("@"):
            key, _, value = text[1:].partition(" ")
            known[key] = value.strip()
        elif text:
            paths += expand_braces(text)
    return NamedMix(name, tuple(paths), known["base"], known["token_dtype"], int(known["tokens"]))


def expand_braces(pattern: str) -> list[str]:
    """`a-{0..2}-{x,y}` as `a-0-x, a-0-y, a-1-x, ...`; counted numbers keep the width they are written with."""
    choices = [_alternatives(content) for content in _BRACES.findall(pattern)]
    pieces = _BRACES.sub("\0", pattern).split("\0")
    return ["".join(_interleave(pieces, chosen)) for chosen in itertools.product(*choices)]


def _interleave(pieces: list[str], chosen: tuple[str, ...]) -> list[str]:
    return [text for pair in itertools.zip_longest(pieces, chosen, fillvalue="") for text in pair]


def _alternatives(content: str) -> list[str]:
    found: list[str] = []
    for part in content.split(","):
        counted = _RANGE.fullmatch(part)
        if counted is None:
            found.append(part)
        else:
            first, last = counted.groups()
            found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return found
