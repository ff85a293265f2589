"""Scaling laws fitted to finished runs: pure functions of numbers.

    L(N, D) = E + A / N^a + B / D^b     (Hoffmann et al. 2022, arXiv:2203.15556, section 3.3)
    L(C)    = E + A / C^a,  C = 6 N D   where the runs cannot tell the influence of size from that of length

For fixed exponents a law is linear in E, A and B, so only the exponents are searched, on a grid that is narrowed
around its best place. Squares of relative residuals are minimised, E, A and B are not negative, nothing is random.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from olmo_hf.errors import DataError

EXPONENTS = (0.01, 3.0)
"""Between these exponents are looked for."""

_GRID, _NARROWED = 41, 9
_ROUNDS = 48
_SAME = 0.01
"""Sizes or lengths that differ by less than this part count as the same."""


@dataclass(frozen=True)
class Point:
    """A finished run: `parameters` without embeddings, `tokens` read, final `loss` in nats."""

    name: str
    parameters: float
    tokens: float
    loss: float

    @property
    def compute(self) -> float:
        """6 N D, the usual estimate of floating-point operations."""
        return 6 * self.parameters * self.tokens


@dataclass(frozen=True)
class Term:
    """`coefficient / x ** exponent` of one variable, `parameters`, `tokens` or `compute`."""

    variable: str
    coefficient: float
    exponent: float


@dataclass(frozen=True)
class ScalingLaw:
    """A floor and terms that fall."""

    floor: float
    terms: tuple[Term, ...]

    def predict(self, parameters: float, tokens: float) -> float:
        """The loss of a run of this size and length."""
        point = Point("", parameters, tokens, math.nan)
        return self.floor + sum(
            term.coefficient * getattr(point, term.variable) ** -term.exponent for term in self.terms
        )

    def formula(self) -> str:
        """The law as a line of text."""
        names = {"parameters": "N", "tokens": "D", "compute": "C"}
        parts = [f"{term.coefficient:.4g} / {names[term.variable]}^{term.exponent:.4f}" for term in self.terms]
        return f"L = {self.floor:.4f} + " + " + ".join(parts)


def fit_law(points: Sequence[Point]) -> ScalingLaw:
    """The law that the points allow: of size and length, or of compute alone.

    Raises:
        DataError: Fewer than three runs of different compute, or a loss that is not a finite number above 0.
    """
    bad = [point.name for point in points if not 0 < point.loss < math.inf]
    if bad:
        raise DataError(f"these runs have no finite loss: {', '.join(bad)}; leave them out")
    if why_no_law_of_size_and_length(points) is None:
        return _fit(points, ("parameters", "tokens"))
    found = _distinct([point.compute for point in points])
    if found < 3:
        raise DataError(
            f"found {len(points)} runs of {found} different amounts of compute, expected at least 3 to fit a law"
        )
    return _fit(points, ("compute",))


def why_no_law_of_size_and_length(points: Sequence[Point]) -> str | None:
    """What is lacking for five unknowns, or None."""
    if len(points) < 5:
        return f"{len(points)} runs are fewer than its 5 unknowns"
    for variable, said in (("parameters", "sizes"), ("tokens", "lengths")):
        found = _distinct([getattr(point, variable) for point in points])
        if found < 3:
            return f"the runs have {found} different {said}, and it takes 3"
    if _distinct([point.tokens / point.parameters for point in points]) < 2:
        return "all runs have the same tokens per parameter"
    return None


def relative_residuals(law: ScalingLaw, points: Sequence[Point]) -> list[float]:
    """Prediction over measurement, less 1, of each point."""
    return [law.predict(point.parameters, point.tokens) / point.loss - 1 for point in points]


def _distinct(values: Sequence[float]) -> int:
    groups: list[float] = []
    for value in sorted(values):
        if not groups or value > groups[-1] * (1 + _SAME):
            groups.append(value)
    return len(groups)


def _fit(points: Sequence[Point], variables: tuple[str, ...]) -> ScalingLaw:
    # Divided by their geometric means, so that the columns are of one size whatever the exponent.
    logs = np.array([[math.log(getattr(point, name)) for name in variables] for point in points])  # (runs, terms)
    middle = logs.mean(axis=0)
    losses = np.array([point.loss for point in points])

    def solve(exponents: Sequence[float]) -> tuple[float, np.ndarray]:
        columns = np.exp(-(logs - middle) * np.array(exponents))
        return _least_squares(np.column_stack([np.ones(len(points)), columns]) / losses[:, None])

    exponents = _search(lambda exponents: solve(exponents)[0], len(variables))
    _, (floor, *coefficients) = solve(exponents)
    terms = [
        Term(name, float(coefficient * math.exp(exponent * center)), float(exponent))
        for name, coefficient, exponent, center in zip(variables, coefficients, exponents, middle, strict=True)
    ]
    return ScalingLaw(float(floor), tuple(terms))


def _least_squares(columns: np.ndarray) -> tuple[float, np.ndarray]:
    """Coefficients, none below 0, that bring `columns @ coefficients` closest to 1; and the sum of squares left.

    Every choice of columns is tried: there are at most three.
    """
    ones = np.ones(len(columns))
    best, best_at = float(len(columns)), np.zeros(columns.shape[1])
    indices = range(columns.shape[1])
    for chosen in itertools.chain.from_iterable(itertools.combinations(indices, n + 1) for n in indices):
        some = columns[:, chosen]
        found, *_ = np.linalg.lstsq(some, ones, rcond=None)
        if (found < 0).any():
            continue
        left = float(np.square(some @ found - 1).sum())
        if left < best:
            best, best_at = left, np.zeros(columns.shape[1])
            best_at[list(chosen)] = found
    return best, best_at


def _search(error_at: Callable[[tuple[float, ...]], float], dimensions: int) -> tuple[float, ...]:
    """The exponents of least error: a grid in logarithms, narrowed by half again and again."""
    low, high = (math.log(bound) for bound in EXPONENTS)
    axes = [np.linspace(low, high, _GRID)] * dimensions
    width = (high - low) / (_GRID - 1) * 2
    best = (math.inf, tuple([0.0] * dimensions))
    for _ in range(_ROUNDS):
        for place in itertools.product(*axes):
            error = error_at(tuple(math.exp(coordinate) for coordinate in place))
            if error < best[0]:
                best = (error, place)
        axes = [np.linspace(max(low, at - width), min(high, at + width), _NARROWED) for at in best[1]]
        width *= 0.6
    return tuple(math.exp(coordinate) for coordinate in best[1])
