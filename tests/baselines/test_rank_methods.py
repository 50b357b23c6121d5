"""The torchrun baselines with ranks as threads, against the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tilerelay.baselines.cell import Cell
from tilerelay.baselines.operands import Operands
from tilerelay.baselines.rank_methods import (
    RankAsyncTensorParallel,
    RankAsyncTensorParallelGathered,
    RankFloor,
    RankTensorParallel,
    RankTwoShot,
)
from tilerelay.baselines.reference import Reference, covers

METHODS = [RankTensorParallel, RankTwoShot, RankAsyncTensorParallel, RankAsyncTensorParallelGathered]
CELLS = [Cell(2, 2, 24, 16, 16), Cell(2, 2, 24, 32, 16), Cell(4, 4, 24, 16, 16)]


@pytest.mark.parametrize("make", METHODS, ids=lambda m: m.name)
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_every_rank_makes_its_part(make: Any, cell: Cell, run_ranks: Callable[..., list[Any]]) -> None:
    assert make().refusal(cell) is None

    def work(ops: Any) -> Any:
        operands = Operands({ops.rank: torch.device("cpu")}, cell.widths, cell.m + 8, dtype=torch.float32)
        for variant in make().variants(cell, operands, ops):
            for tensor in variant.poison:
                tensor.fill_(float("nan"))
            variant.enqueue()
            if not variant.compute_only:
                pieces = variant.pieces()
                error = Reference(operands, ops.rank).worst_row_error(pieces)
        return pieces, error

    results = run_ranks(cell.gpus, work)
    assert all(error < 1e-4 for _, error in results)
    assert covers([piece for pieces, _ in results for piece in pieces], cell.m, cell.widths[-1])


def test_the_ranks_floor_is_the_same_work(run_ranks: Callable[..., list[Any]]) -> None:
    cell = Cell(2, 2, 24, 16, 16)

    def work(ops: Any) -> list[str]:
        operands = Operands({ops.rank: torch.device("cpu")}, cell.widths, cell.m, dtype=torch.float32)
        variants = RankFloor().variants(cell, operands, ops)
        for variant in variants:
            variant.enqueue()
        return [v.label for v in variants]

    assert run_ranks(2, work) == [["layer per GPU", "cut by columns", "cut by rows"]] * 2


def test_operands_are_equal_on_every_rank_and_gpu() -> None:
    cpu = torch.device("cpu")
    one, two = (Operands({rank: cpu}, (16, 32), 8) for rank in (0, 1))
    assert torch.equal(one.x(0), two.x(1)) and torch.equal(one.weight(0, 0), two.weight(0, 1))
    both = Operands({0: cpu, 1: cpu}, (16, 32), 8)
    assert torch.equal(both.weight(0, 0), both.weight(0, 1))
    assert both.weight(0, 0).data_ptr() != both.weight(0, 1).data_ptr()
    assert 0.9 < float(one.x(0).float().std()) < 1.1
