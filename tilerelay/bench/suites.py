"""The suites: which cells each table and figure of the paper asks for. Cells that suites share are measured once."""

from __future__ import annotations

from collections.abc import Sequence

from tilerelay.baselines.cell import Cell
from tilerelay.bench import paper
from tilerelay.errors import InvalidInput

WIDTH = paper.WIDTH

SUITES: dict[str, tuple[Cell, ...]] = {
    "paper-fig4": tuple(Cell(g, g, paper.FIGURE_4_M, WIDTH, WIDTH) for g in paper.FIGURE_4),
    "paper-fig5": tuple(Cell(2, 2, m, WIDTH, WIDTH) for m in paper.FIGURE_5),
    "paper-table1": tuple(Cell(g, g, paper.TABLE_1_M, WIDTH, WIDTH) for g in paper.TABLE_1),
    "paper-fig7": tuple(Cell(g, 2, m, WIDTH, WIDTH) for g in paper.FIGURE_7_GPUS for m in paper.FIGURE_7_M),
    # Beyond the paper: its chains at more batch sizes, and the MLP of a 70B model, 8192 -> 28672 -> 8192.
    "latency": (
        *(Cell(2, 2, m, WIDTH, WIDTH) for m in (512, *paper.FIGURE_5)),
        *(Cell(g, layers, m, WIDTH, WIDTH) for g in (4, 8) for layers in (g, 2) for m in paper.FIGURE_5),
    ),
    "mlp": tuple(Cell(g, 2, m, 28672, WIDTH) for g in (2, 4, 8) for m in (512, 1024, 2048, 4096, 8192)),
    "quick": (Cell(2, 2, 4096, WIDTH, WIDTH),),
}
ALL = "all"


def cells_of(suite: str, gpus: Sequence[int] = (), ms: Sequence[int] = ()) -> list[Cell]:
    """Cells of a suite, or of all, each once, cells of one shape together.

    Args:
        gpus, ms: keep only cells with these; empty: all.

    Raises:
        InvalidInput: an unknown suite, or a number of GPUs or rows that no cell of it has.
    """
    if suite != ALL and suite not in SUITES:
        raise InvalidInput(f"unknown suite {suite!r}; choose one of {', '.join([*SUITES, ALL])}")
    cells = {cell for name in (SUITES if suite == ALL else [suite]) for cell in SUITES[name]}
    for what, asked, offered in (("GPUs", gpus, {c.gpus for c in cells}), ("M", ms, {c.m for c in cells})):
        for value in asked:
            if value not in offered:
                raise InvalidInput(
                    f"suite {suite} has no cell with {what}={value}; it has {', '.join(map(str, sorted(offered)))}"
                )
    chosen = [c for c in cells if (not gpus or c.gpus in gpus) and (not ms or c.m in ms)]
    if not chosen:
        raise InvalidInput(f"suite {suite} has no cell with both GPUs={list(gpus)} and M={list(ms)}")
    return sorted(chosen, key=lambda c: (c.shape, c.m))


def suites_of(cell: Cell) -> list[str]:
    """Names of all suites that hold a cell."""
    return [name for name, cells in SUITES.items() if cell in cells]
