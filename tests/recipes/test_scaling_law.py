"""Scaling laws from points that follow one."""

import math

import numpy as np
import pytest

from olmo_hf.errors import DataError
from olmo_hf.recipes.scaling_law import (
    Point,
    fit_law,
    relative_residuals,
    why_no_law_of_size_and_length,
)

SIZES = (20e6, 60e6, 150e6, 300e6)
MULTIPLES = (1, 2, 5, 10)


def chinchilla(parameters: float, tokens: float) -> float:
    """The law of Hoffmann et al. 2022, with its published numbers."""
    return 1.69 + 406.4 / parameters**0.34 + 410.7 / tokens**0.28


def ladder(noise: float = 0.0) -> list[Point]:
    random = np.random.default_rng(0)
    return [
        Point(f"{n:g}-{k}", n, 20 * k * n, chinchilla(n, 20 * k * n) * math.exp(noise * random.standard_normal()))
        for n in SIZES
        for k in MULTIPLES
    ]


def test_known_exponents_come_back():
    """Exact points determine the law; what is left is the rounding of a sum of squares near zero, 1e-8 in an exponent
    that has an error of 1e-16 in the sum."""
    law = fit_law(ladder())
    size, length = law.terms
    assert (size.variable, length.variable) == ("parameters", "tokens")
    assert size.exponent == pytest.approx(0.34, abs=1e-5)
    assert length.exponent == pytest.approx(0.28, abs=1e-5)
    assert law.floor == pytest.approx(1.69, abs=1e-4)
    assert size.coefficient == pytest.approx(406.4, rel=1e-3)
    assert length.coefficient == pytest.approx(410.7, rel=1e-3)
    assert max(abs(residual) for residual in relative_residuals(law, ladder())) < 1e-8
    assert law.predict(70e9, 1.4e12) == pytest.approx(chinchilla(70e9, 1.4e12), abs=1e-4)


def test_a_little_noise_moves_the_prediction_a_little():
    """Noise of 0.1 % on each loss; ten times as far out the prediction stays within 1 %."""
    law = fit_law(ladder(noise=0.001))
    assert law.predict(3e9, 60e9) == pytest.approx(chinchilla(3e9, 60e9), rel=0.01)


def test_the_order_of_the_runs_does_not_matter():
    points = ladder(noise=0.001)
    assert fit_law(points[::-1]).predict(1e9, 20e9) == pytest.approx(fit_law(points).predict(1e9, 20e9), rel=1e-6)


def test_three_runs_give_a_law_of_compute():
    def loss(parameters: float, tokens: float) -> float:
        return 2.0 + 900.0 / (6 * parameters * tokens) ** 0.15

    points = [Point(f"{n:g}", n, 20 * n, loss(n, 20 * n)) for n in (1e6, 3e6, 1e7)]
    law = fit_law(points)
    (term,) = law.terms
    assert term.variable == "compute"
    assert term.exponent == pytest.approx(0.15, abs=1e-6)
    assert law.floor == pytest.approx(2.0, abs=1e-5)
    assert law.formula() == "L = 2.0000 + 900 / C^0.1500"


@pytest.mark.parametrize(
    ("chosen", "why"),
    [
        (lambda points: points[:4], "4 runs are fewer than its 5 unknowns"),
        (lambda points: points[:8], "2 different sizes"),
        (lambda points: [p for p in points if p.tokens == 20 * p.parameters] * 2, "same tokens per parameter"),
    ],
)
def test_what_the_runs_cannot_tell_is_said(chosen, why):
    assert why in why_no_law_of_size_and_length(chosen(ladder()))


@pytest.mark.parametrize(
    ("points", "said"),
    [
        ([Point("a", 1e6, 2e7, 4.0), Point("b", 1e6, 2e7, 4.0), Point("c", 2e6, 4e7, 3.0)], "2 different amounts"),
        ([Point("a", 1e6, 2e7, math.nan), Point("b", 2e6, 2e7, 4.0)], "no finite loss: a"),
        ([Point("a", 1e6, 2e7, math.inf)], "no finite loss"),
    ],
)
def test_too_little_is_refused(points, said):
    with pytest.raises(DataError, match=said):
        fit_law(points)


def test_losses_that_do_not_fall_give_a_flat_law():
    """No coefficient is negative: a ladder of equal losses is a floor and nothing else."""
    points = [Point(p.name, p.parameters, p.tokens, 3.0) for p in ladder()]
    law = fit_law(points)
    assert law.predict(1e12, 1e14) == pytest.approx(3.0, abs=1e-6)
