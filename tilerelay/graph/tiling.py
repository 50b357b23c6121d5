"""Tile grids: how an [M, N] output is cut into tiles, and in which order the tiles are computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tilerelay.errors import InvalidInput

Int32s = NDArray[np.int32]


LARGEST = 2**31 - 1  # kernels count in int32
MOST_TILES = 2**24


@dataclass(frozen=True)
class TileGrid:
    """An [m, n] output cut into [block_m, block_n] tiles; the last row and column of tiles may be ragged.

    Tile ids run along rows: tile = row * cols + col, so the tiles of a row panel are neighbours.
    """

    m: int
    n: int
    block_m: int
    block_n: int

    def __post_init__(self) -> None:
        for name in ("m", "n", "block_m", "block_n"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise InvalidInput(f"{name}={value!r}: sizes must be whole numbers")
            if not 0 < value <= LARGEST:
                raise InvalidInput(f"{name}={value}: sizes must be positive and below 2**31")
        if self.tiles > MOST_TILES:
            raise InvalidInput(
                f"{self.tiles} tiles of {self.block_m} x {self.block_n}: at most {MOST_TILES}; take larger ones"
            )

    @property
    def rows(self) -> int:
        """Number of row panels."""
        return -(-self.m // self.block_m)

    @property
    def cols(self) -> int:
        """Number of tiles in a row panel."""
        return -(-self.n // self.block_n)

    @property
    def tiles(self) -> int:
        return self.rows * self.cols

    def coords(self, tile: int) -> tuple[int, int]:
        """(row, col) of a tile id."""
        return divmod(tile, self.cols)

    def extent(self, tile: int) -> tuple[int, int, int, int]:
        """Elements that a tile covers: (first row, end row, first column, end column), clipped to [m, n]."""
        row, col = self.coords(tile)
        return (
            row * self.block_m,
            min((row + 1) * self.block_m, self.m),
            col * self.block_n,
            min((col + 1) * self.block_n, self.n),
        )


def row_panel_order(grid: TileGrid) -> Int32s:
    """All tiles of the first row panel, then of the second, ...: the earliest complete panels."""
    return np.arange(grid.tiles, dtype=np.int32)


def grouped_order(grid: TileGrid, group_rows: int) -> Int32s:
    """Columns of `group_rows` panels at a time: re-uses weight tiles in L2, completes panels in batches."""
    if group_rows <= 0:
        raise InvalidInput(f"group_rows={group_rows}: must be positive")
    ids = np.arange(grid.tiles, dtype=np.int32).reshape(grid.rows, grid.cols)
    chunks = [ids[row : row + group_rows].T.reshape(-1) for row in range(0, grid.rows, group_rows)]
    return np.concatenate(chunks)


def permutation_order(grid: TileGrid, tiles: Sequence[int] | Int32s) -> Int32s:
    """Any order; must name every tile exactly once."""
    order = np.asarray(tiles, dtype=np.int32)
    if order.shape != (grid.tiles,) or not np.array_equal(np.sort(order), np.arange(grid.tiles)):
        raise InvalidInput(f"a tile order must name each of the grid's {grid.tiles} tiles exactly once")
    return order
