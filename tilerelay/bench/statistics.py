"""Medians with their spread. Times are in microseconds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from tilerelay.errors import InvalidInput


@dataclass(frozen=True)
class Summary:
    """Median, least and most of one variant's rounds."""

    median_us: float
    min_us: float
    max_us: float


def summarise(times_us: Sequence[float]) -> Summary:
    """Raises InvalidInput: no times, or one that is not a positive finite number: a clock that failed is no outlier."""
    if not times_us:
        raise InvalidInput("no rounds were timed")
    for time in times_us:
        if not math.isfinite(time) or time <= 0:
            raise InvalidInput(f"a round took {time} us: the clock failed")
    return Summary(float(median(times_us)), float(min(times_us)), float(max(times_us)))


def reduction(ours: float, theirs: float) -> float:
    """How much less time (or ratio to floor) ours is: 0.25 when a quarter is saved, negative when ours is slower."""
    return 1.0 - ours / theirs


def middle(values: Sequence[float]) -> float | None:
    """The median, or None of nothing."""
    return float(median(values)) if values else None
