"""Even walks: every sum is computed once, its pieces meet, and all CTAs have the same work."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tilerelay.errors import InvalidInput
from tilerelay.graph.tiling import TileGrid, grouped_order
from tilerelay.graph.walk import SHORTEST, Walk, even_walk, is_thin
from tilerelay.graph.workload import Stage, with_walk


@st.composite
def walks(draw: st.DrawFn) -> tuple[int, int, int, Walk]:
    """(tiles, k, unit, walk); the sum's last unit may be ragged."""
    together, workers = draw(st.sampled_from([(1, 7), (2, 5), (4, 3), (1, 2), (4, 33)]))
    groups = draw(st.integers(workers, 4 * workers).filter(lambda groups: groups % workers))
    unit, length = draw(st.sampled_from([(1, 70), (64, 5), (8, 128), (16, 2)]))
    k = unit * length - draw(st.integers(0, unit - 1))
    order = np.random.default_rng(groups).permutation(groups * together).astype(np.int32)
    walk = even_walk(order, k, workers * together + draw(st.integers(0, together - 1)), together=together, unit=unit)
    assume(walk is not None)
    assert walk is not None and walk.ctas == workers * together
    return len(order), k, unit, walk


def lengths(walk: Walk) -> np.ndarray:  # type: ignore[type-arg]
    """[turns, ctas] how much of a sum each CTA computes in each turn."""
    return (walk.pieces[:, 1] - walk.pieces[:, 0]).reshape(-1, walk.ctas)


@given(walks())
def test_every_sum_is_computed_once(case: tuple[int, int, int, Walk]) -> None:
    tiles, k, unit, walk = case
    pieces: dict[int, list[tuple[int, int]]] = {}
    for tile, (begin, end, _) in zip(walk.tiles.tolist(), walk.pieces.tolist(), strict=True):
        if begin < end:
            pieces.setdefault(tile, []).append((begin, end))
        else:
            assert begin == end == 0
    assert sorted(pieces) == list(range(tiles))
    for parts in pieces.values():
        first, last = min(parts), max(parts)
        assert first[0] == 0 and last[1] == k and len(parts) <= 2
        assert len(parts) == 1 or (first[1] == last[0] and last[0] % unit == 0)
    assert int(walk.ends(k).sum()) == tiles


@given(walks())
def test_nobody_waits_for_a_cta_that_waits(case: tuple[int, int, int, Walk]) -> None:
    """A first piece is the first thing that its CTA does, a second one the last."""
    _, k, _, walk = case
    shape = (-1, walk.ctas)
    begins, ends = (walk.pieces[:, i].reshape(shape) for i in (0, 1))
    first = (ends > begins) & (ends < k)
    assert not first[1:].any()
    for cta in range(walk.ctas):
        second = np.flatnonzero(begins[:, cta] > 0)
        done = np.flatnonzero(lengths(walk)[:, cta])
        assert len(second) <= 1 and (len(second) == 0 or second[0] == done[-1])
        assert (lengths(walk)[:, cta] > 0)[ends[:, cta] == k].any(), "a CTA leaves its run after a sum that it ends"


@given(walks())
def test_a_place_holds_one_sum(case: tuple[int, int, int, Walk]) -> None:
    _, k, _, walk = case
    begin, end, place = walk.pieces.T
    shared = (begin < end) & ((begin > 0) | (end < k))
    assert set(place[shared].tolist()) == set(range(walk.places))
    for p in range(walk.places):
        here = np.flatnonzero(shared & (place == p))
        assert len(here) == 2 and len(set(walk.tiles[here].tolist())) == 1


@given(walks())
def test_all_have_the_same_work(case: tuple[int, int, int, Walk]) -> None:
    tiles, k, unit, walk = case
    work = lengths(walk).sum(axis=0)
    even = tiles * k / walk.ctas
    assert abs(work - even).max() <= 2 * (unit + SHORTEST * k)


def test_tiles_that_share_weights_are_computed_together() -> None:
    """The four row panels of a column: neighbours in the grid, the same piece, the same turn."""
    grid = TileGrid(512, 14336, 128, 256)
    walk = even_walk(grouped_order(grid, 4), 8192, 132, together=4, unit=64)
    assert walk is not None and (walk.ctas, walk.tickets) == (132, 3 * 132)
    columns = walk.tiles.reshape(-1, 4) % grid.cols
    assert (columns == columns[:, :1]).all()
    assert (walk.pieces.reshape(-1, 4, 3)[:, :, :2] == walk.pieces.reshape(-1, 4, 3)[:, :1, :2]).all()
    assert lengths(walk).sum(axis=0).max() <= 1.76 * 8192, "224 tiles on 132 CTAs: 1.70 waves, not 2"


@pytest.mark.parametrize(
    ("tiles", "thin"),
    [(131, False), (132, False), (140, True), (224, True), (256, False), (448, True), (516, False), (560, False)],
)
def test_what_is_thin(tiles: int, thin: bool) -> None:
    """Two thirds of a wave lost, a tenth, or a little of many."""
    assert is_thin(tiles, 132) == thin


def test_a_stage_gets_a_walk_where_its_last_wave_is_thin() -> None:
    thin = with_walk(Stage("thin", TileGrid(512, 14336, 128, 256), 8192), 132, unit=64)
    assert thin.walk is not None and thin.walk.ctas == 132
    full = Stage("full", TileGrid(1024, 8192, 128, 256), 8192)
    assert with_walk(full, 132, unit=64) is full
    share = Stage("a small share of the SMs", TileGrid(512, 128, 128, 128), 8192)
    assert with_walk(share, 3, unit=64) is share


@pytest.mark.parametrize("tiles", [131, 132, 396])
def test_no_walk_without_a_thin_wave(tiles: int) -> None:
    assert even_walk(np.arange(tiles, dtype=np.int32), 64, 132, together=1, unit=8) is None


def test_no_walk_where_sums_cannot_be_cut() -> None:
    assert even_walk(np.arange(200, dtype=np.int32), 64, 132, together=1, unit=64) is None


@pytest.mark.parametrize(("tiles", "ctas", "together"), [(6, 4, 4), (8, 3, 4), (8, 4, 0)])
def test_groups_that_do_not_divide(tiles: int, ctas: int, together: int) -> None:
    with pytest.raises(InvalidInput, match="not made in groups"):
        even_walk(np.arange(tiles, dtype=np.int32), 64, ctas, together=together, unit=8)
