"""What was recorded beside what was found again."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from olmo_hf.replay.record import COMPARED


@dataclass(frozen=True)
class Comparison:
    """One metric of one step."""

    step: int
    metric: str
    recorded: float
    found: float

    @property
    def difference(self) -> float:
        """Absolute; 0.0 also where both are the same kind of no number."""
        same = self.recorded == self.found or (math.isnan(self.recorded) and math.isnan(self.found))
        return 0.0 if same else abs(self.recorded - self.found)

    def is_equal(self, tolerance: float) -> bool:
        """Whether they agree: to the last bit with a tolerance of 0, otherwise relative to what was recorded."""
        return self.difference <= tolerance * abs(self.recorded)  # False where the difference is no number


def compare(recorded: Mapping[int, Mapping[str, float]], found: Mapping[int, Mapping[str, float]]) -> list[Comparison]:
    """Every recorded metric with the one found again, by step; NaN where it was not found."""
    return [
        Comparison(step, metric, recorded[step][metric], found.get(step, {}).get(metric, math.nan))
        for step in sorted(recorded)
        for metric in COMPARED
        if metric in recorded[step]
    ]
