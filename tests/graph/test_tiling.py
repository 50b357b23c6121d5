"""Tile grids cover the output exactly once; tile orders are permutations."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilerelay.errors import InvalidInput
from tilerelay.graph.tiling import TileGrid, grouped_order, permutation_order, row_panel_order

sizes = st.integers(1, 40)
grids = st.builds(TileGrid, sizes, sizes, sizes, sizes)


@given(grids)
def test_tiles_cover_every_element_once(grid: TileGrid) -> None:
    covered = np.zeros((grid.m, grid.n), dtype=int)
    for tile in range(grid.tiles):
        top, bottom, left, right = grid.extent(tile)
        assert 0 < bottom - top <= grid.block_m and 0 < right - left <= grid.block_n
        covered[top:bottom, left:right] += 1
    assert (covered == 1).all()


@given(grids)
def test_tile_ids_run_along_rows(grid: TileGrid) -> None:
    coords = [grid.coords(tile) for tile in range(grid.tiles)]
    assert coords == [(row, col) for row in range(grid.rows) for col in range(grid.cols)]


@pytest.mark.parametrize(
    ("grid", "rows", "cols", "last"),
    [
        (TileGrid(100, 300, 128, 256), 1, 2, (0, 100, 256, 300)),  # fewer rows than a tile has
        (TileGrid(129, 256, 128, 256), 2, 1, (128, 129, 0, 256)),  # one row of elements in the last panel
        (TileGrid(256, 512, 128, 256), 2, 2, (128, 256, 256, 512)),
        (TileGrid(1, 1, 128, 256), 1, 1, (0, 1, 0, 1)),
    ],
)
def test_ragged_grids(grid: TileGrid, rows: int, cols: int, last: tuple[int, int, int, int]) -> None:
    assert (grid.rows, grid.cols, grid.tiles) == (rows, cols, rows * cols)
    assert grid.extent(grid.tiles - 1) == last


@given(grids, st.integers(1, 50))
def test_orders_name_every_tile_once(grid: TileGrid, group_rows: int) -> None:
    for order in (row_panel_order(grid), grouped_order(grid, group_rows)):
        assert order.dtype == np.int32
        assert sorted(order) == list(range(grid.tiles))


@given(grids, st.integers(1, 50))
def test_a_grouped_order_finishes_a_group_of_panels_before_the_next(grid: TileGrid, group_rows: int) -> None:
    groups = [grid.coords(int(tile))[0] // group_rows for tile in grouped_order(grid, group_rows)]
    assert groups == sorted(groups)


def test_a_grouped_order_walks_down_the_columns_of_a_group() -> None:
    grid = TileGrid(3, 2, 1, 1)
    assert grouped_order(grid, 2).tolist() == [0, 2, 1, 3, 4, 5]
    assert grouped_order(grid, 1).tolist() == row_panel_order(grid).tolist() == [0, 1, 2, 3, 4, 5]


@given(grids, st.randoms(use_true_random=False))
def test_any_permutation_is_an_order(grid: TileGrid, random) -> None:  # type: ignore[no-untyped-def]
    tiles = list(range(grid.tiles))
    random.shuffle(tiles)
    assert permutation_order(grid, tiles).tolist() == tiles


@pytest.mark.parametrize("tiles", [[0, 1, 2], [0, 1, 2, 2], [0, 1, 2, 4], [-1, 0, 1, 2], [0, 1, 2, 3, 0], []])
def test_an_order_that_is_no_permutation_is_refused(tiles: list[int]) -> None:
    with pytest.raises(InvalidInput, match="name each of the grid's 4 tiles exactly once"):
        permutation_order(TileGrid(2, 2, 1, 1), tiles)


@pytest.mark.parametrize("name", ["m", "n", "block_m", "block_n"])
@pytest.mark.parametrize("size", [0, -3])
def test_sizes_that_are_not_positive_are_refused(name: str, size: int) -> None:
    with pytest.raises(InvalidInput, match=f"{name}={size}: sizes must be positive"):
        TileGrid(**{"m": 8, "n": 8, "block_m": 4, "block_n": 4, name: size})


def test_groups_of_no_panels_are_refused() -> None:
    with pytest.raises(InvalidInput, match="group_rows=0: must be positive"):
        grouped_order(TileGrid(8, 8, 4, 4), 0)
