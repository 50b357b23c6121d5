"""Walks: which pieces of which tiles each CTA of a persistent grid computes, where tiles make few waves, one thin.

A walk cuts the tiles' sums so that all CTAs have the same work ("stream-K", Osama et al., arXiv:2301.03598). A sum that
is cut is begun by one CTA and continued, not added to, by the next one, so that it has the bits of an uncut sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tilerelay.errors import InvalidInput
from tilerelay.graph.tiling import Int32s

SHORTEST = 1 / 16  # of a tile's sum: a piece that is shorter is left to the CTA that has the rest
# Of the SMs' time in a stage, when an even walk is made: measured on an H200, handing sums over costs 4 to 7 % of it.
THIN = 0.9
MOST_WAVES = 4


@dataclass(frozen=True, eq=False)
class Walk:
    """Ticket i * ctas + c is the i-th thing that CTA c does: a piece of a tile's sum, or nothing.

    Attributes:
        ctas: CTAs of the grid.
        tiles: [tickets] tile of each.
        pieces: [tickets, 3] begin and end of the piece, in elements of k (both 0: nothing), and the place where a sum
            waits between its two pieces.
        places: how many there are.
    """

    ctas: int
    tiles: Int32s
    pieces: NDArray[np.int32]
    places: int

    @property
    def tickets(self) -> int:
        return len(self.tiles)

    def ends(self, k: int) -> NDArray[np.bool_]:
        """[tickets] whether the ticket ends its tile's sum, whose length is k."""
        return np.asarray(self.pieces[:, 1] == k)


def even_walk(order: Int32s, k: int, ctas: int, *, together: int, unit: int) -> Walk | None:
    """All CTAs get the same length of sums, and each ends at least one; None where there is nothing to cut.

    `together` tiles that follow each other in the order are cut alike and computed at the same time, by as many CTAs:
    they share weight tiles in L2.

    Args:
        order: tile ids in the order of computation.
        k: length of a tile's sum.
        ctas: most CTAs of the grid.
        unit: sums are cut at multiples of this.

    Raises:
        InvalidInput: `together` does not divide the number of tiles, or is more than the CTAs.
    """
    if together <= 0 or len(order) % together or together > ctas:
        raise InvalidInput(f"{len(order)} tiles for {ctas} CTAs are not made in groups of {together}")
    groups, workers = len(order) // together, ctas // together
    if groups < workers or groups % workers == 0:
        return None
    # All sums in a row, in units; a worker takes a stretch. It does the last group of its stretch first, whose sum the
    # next worker continues, and the first group of it last, whose sum the worker before has begun by then.
    length = -(-k // unit)
    ends = [_snapped(groups * length * worker // workers, length) for worker in range(workers + 1)]
    stretches = [
        [
            (group, max(start - group * length, 0), min(end - group * length, length))
            for group in reversed(range(start // length, -(-end // length)))
        ]
        for start, end in pairwise(ends)
    ]
    rounds = max(map(len, stretches))
    tiles = np.zeros((rounds, workers, together), dtype=np.int32)
    pieces = np.zeros((rounds, workers, together, 3), dtype=np.int32)
    places: dict[int, int] = {}
    for worker, stretch in enumerate(stretches):
        for turn, (group, begin, end) in enumerate(stretch):
            tiles[turn, worker] = order[group * together : (group + 1) * together]
            pieces[turn, worker, :, 0] = begin * unit
            pieces[turn, worker, :, 1] = min(end * unit, k)
            if (begin, end) != (0, length):
                place = places.setdefault(group, len(places))
                pieces[turn, worker, :, 2] = np.arange(place * together, (place + 1) * together)
    if not places:
        return None
    return Walk(workers * together, tiles.reshape(-1), pieces.reshape(-1, 3), len(places) * together)


def is_thin(tiles: int, sms: int) -> bool:
    """Whether the last of few waves leaves so many SMs without a tile that cutting sums saves time."""
    waves = -(-tiles // sms)
    return sms <= tiles < MOST_WAVES * sms and tiles < THIN * waves * sms


def _snapped(position: int, length: int) -> int:
    """A cut that would leave a piece too short moves to the edge of its tile."""
    group, inside = divmod(position, length)
    if inside < length * SHORTEST:
        return group * length
    return (group + 1) * length if inside > length * (1 - SHORTEST) else position
