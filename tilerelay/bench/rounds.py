"""The order of measurement: every variant of every method once per round, in a new order each round.

Clocks drift with temperature and power. Methods timed one after the other would each get a clock of their own; inside a
round all get the same. The order changes so that nobody always runs behind the same, hotter neighbour. It is the same
in every run and on every rank.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

WARM_UP_ROUNDS = 3


def order_of_round(entries: Sequence[T], round_number: int) -> list[T]:
    order = list(entries)
    random.Random(round_number).shuffle(order)
    return order


def interleave(
    entries: Sequence[T],
    rounds: int,
    run: Callable[[T, bool], None],
    *,
    warm_up: int = WARM_UP_ROUNDS,
    after_round: Callable[[int, int], None] = lambda done, of: None,
) -> None:
    """Call `run(entry, timed)` for every entry in every round; the first `warm_up` rounds are not timed."""
    for number in range(warm_up + rounds):
        for entry in order_of_round(entries, number):
            run(entry, number >= warm_up)
        after_round(number + 1, warm_up + rounds)
