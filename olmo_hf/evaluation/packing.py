"""Sequences that begin alike, laid into rows in which what they share is computed once.

A row is a tree of tokens written out one path after another: a token attends to those on its path only, and its
position is its depth. The model then says of each path what it would say of the sequence alone.

Shapes: `B` rows of a batch, `S` tokens of the longest row, `N` scored positions, `M` scored tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from olmo_hf.evaluation.encoding import ScoredSequence

ROW_TOKENS = 1024
"""A row takes in further sequences up to here: attention costs the square of its length."""

SCORED_POSITIONS = 512
"""Positions of a batch for which logits are made at once; a single row may have more."""


@dataclass(slots=True)
class Row:
    """A tree of tokens, and what is read off it.

    Attributes:
        tokens: all tokens, path after path.
        depths: the position of each.
        branches: per stretch of new tokens its start, its end, and the places of its ancestors.
        is_plain: whether it is one path, for which causal attention is enough.
        positions, targets, slots: what is scored: place in the row, token, where the log-likelihood goes.
    """

    tokens: list[np.ndarray] = field(default_factory=list)
    depths: list[np.ndarray] = field(default_factory=list)
    branches: list[tuple[int, int, np.ndarray]] = field(default_factory=list)
    is_plain: bool = True
    positions: list[np.ndarray] = field(default_factory=list)
    targets: list[np.ndarray] = field(default_factory=list)
    slots: list[np.ndarray] = field(default_factory=list)
    length: int = 0
    path: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def add(self, sequence: ScoredSequence, shared: int) -> None:
        """Appends what of a sequence is not on the path of the one before.

        Args:
            sequence: comes after the one before in the order of tokens.
            shared: how many tokens the two begin with alike.
        """
        new = sequence.tokens[shared:]
        if len(new):
            stop = self.length + len(new)
            ancestors = self.path[:shared]
            self.is_plain = self.is_plain and shared == len(self.path)
            self.branches.append((self.length, stop, ancestors))
            self.tokens.append(new)
            self.depths.append(np.arange(shared, len(sequence.tokens)))
            self.path = np.concatenate([ancestors, np.arange(self.length, stop)])
            self.length = stop
        count = len(sequence.targets)
        self.positions.append(self.path[sequence.first : sequence.first + count])
        self.targets.append(sequence.targets)
        self.slots.append(np.full(count, sequence.slot))


@dataclass(frozen=True)
class Batch:
    """Rows that are computed together.

    Attributes:
        input_ids: (B, S), filled up with zeros.
        position_ids: (B, S).
        attends: (B, S, S), whether a token sees another; None where causal attention is enough.
        scored_rows: (N,) row of each position that is scored.
        scored_positions: (N,) its place in the row.
        index: (M,) position of each scored token, among the N.
        targets: (M,) the token.
        slots: (M,) where its log-likelihood is added.
    """

    input_ids: np.ndarray
    position_ids: np.ndarray
    attends: np.ndarray | None
    scored_rows: np.ndarray
    scored_positions: np.ndarray
    index: np.ndarray
    targets: np.ndarray
    slots: np.ndarray


def pack_rows(sequences: Sequence[ScoredSequence], *, share: bool) -> list[Row]:
    """Lays sequences into rows.

    Args:
        sequences: in any order.
        share: whether rows may branch. False puts only those together of which one begins with all of the other.
    """
    ordered = sorted(sequences, key=lambda one: one.tokens.astype(">u4").tobytes())
    rows: list[Row] = []
    before: np.ndarray | None = None
    limit = 0
    for sequence in ordered:
        shared = 0 if before is None else _shared_length(before, sequence.tokens)
        new = len(sequence.tokens) - shared
        extends = before is not None and shared == len(before)
        branches = share and before is not None and 4 * shared >= new and rows[-1].length + new <= limit
        if not (extends or branches):
            rows.append(Row())
            shared, limit = 0, max(ROW_TOKENS, 2 * len(sequence.tokens))
        rows[-1].add(sequence, shared)
        before = sequence.tokens
    return rows


def plan_batches(rows: Sequence[Row], *, batch_tokens: int) -> list[list[Row]]:
    """Rows of like length together, the longest first, so that little is filled up and memory is short at once.

    Args:
        rows: in any order.
        batch_tokens: most tokens of a batch, filled-up ones too; a single row may have more.
    """
    batches: list[list[Row]] = []
    scored = 0
    for row in sorted(rows, key=lambda one: (one.is_plain, -one.length)):
        count = sum(map(len, row.positions))
        last = batches[-1] if batches else []
        fits = (
            last
            and last[0].is_plain == row.is_plain
            and (len(last) + 1) * last[0].length <= batch_tokens
            and scored + count <= SCORED_POSITIONS
        )
        if fits:
            last.append(row)
        else:
            batches.append([row])
            scored = 0
        scored += count
    return batches


def collate_rows(rows: Sequence[Row]) -> Batch:
    """Rows as arrays. A token that only fills up sees nothing but itself, and nobody sees it."""
    length = max(row.length for row in rows)
    input_ids = np.zeros((len(rows), length), dtype=np.int64)
    position_ids = np.zeros((len(rows), length), dtype=np.int64)
    plain = all(row.is_plain for row in rows)
    attends = None if plain else np.zeros((len(rows), length, length), dtype=bool)
    scored = []
    for place, row in enumerate(rows):
        input_ids[place, : row.length] = np.concatenate(row.tokens)
        position_ids[place, : row.length] = np.concatenate(row.depths)
        scored.append(np.concatenate(row.positions) + place * length)
        if attends is not None:
            np.fill_diagonal(attends[place], True)
            for start, stop, ancestors in row.branches:
                attends[place, start:stop, ancestors] = True
                attends[place, start:stop, start:stop] = np.tri(stop - start, dtype=bool)
    unique, index = np.unique(np.concatenate(scored), return_inverse=True)
    return Batch(
        input_ids=input_ids,
        position_ids=position_ids,
        attends=attends,
        scored_rows=unique // length,
        scored_positions=unique % length,
        index=index,
        targets=np.concatenate([target for row in rows for target in row.targets]).astype(np.int64),
        slots=np.concatenate([slot for row in rows for slot in row.slots]),
    )


def _shared_length(one: np.ndarray, other: np.ndarray) -> int:
    """How many tokens two sequences begin with alike."""
    length = min(len(one), len(other))
    differs = np.flatnonzero(one[:length] != other[:length])
    return int(differs[0]) if len(differs) else length
