"""The torchrun set: tensor parallelism with a process per GPU, and the floor in the same rounds.

Everybody cuts A by columns and B by rows; what follows the second GEMM differs: NCCL's all-reduce, a two-shot
all-reduce over symmetric memory, or PyTorch's async-TP, whose GEMM and reduce-scatter overlap and leave Y cut by rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tilerelay.baselines import floor
from tilerelay.baselines.cell import Cell
from tilerelay.baselines.method import (
    Lives,
    Piece,
    Variant,
    columns_divide,
    even_layers,
    refuse_unless,
    rows_divide,
    several_gpus,
)
from tilerelay.baselines.operands import Operands
from tilerelay.baselines.rank_ops import RankOps


class RankFloor:
    """The floor's three cuts, each rank computing its part."""

    name = "floor"
    lives = floor.LIVES

    def refusal(self, cell: Cell) -> str | None:
        return floor.Floor().refusal(cell)

    def variants(self, cell: Cell, operands: Operands, ops: RankOps) -> list[Variant]:
        def body(gemms: list[floor.Gemm]) -> Callable[[], None]:
            def enqueue() -> None:
                for x, w, out in gemms:
                    ops.mm(x, w, out)

            return enqueue

        cuts = floor.cuts(cell).items()
        return [Variant(name, body(cut(cell, operands, ops.rank)), lambda: (), checked=False) for name, cut in cuts]


class _Shards:
    """This rank's shards of every pair of layers."""

    def __init__(self, cell: Cell, operands: Operands, ops: RankOps) -> None:
        self.pairs = range(cell.layers // 2)
        self.a = [operands.column_shard(2 * p, ops.rank, ops.rank, ops.world) for p in self.pairs]
        self.b = [operands.row_shard(2 * p + 1, ops.rank, ops.rank, ops.world) for p in self.pairs]
        self.hidden = operands.buffer("hidden", ops.rank, self.a[0].shape[0])[: cell.m]
        self.x = operands.x(ops.rank)[: cell.m]


class _AllReduce:
    name = ""
    lives = Lives(x="on every GPU", y="on every GPU", replicated="X, every second layer's output, Y")

    def refusal(self, cell: Cell) -> str | None:
        return refuse_unless(several_gpus(cell), even_layers(cell), columns_divide(cell))

    def variants(self, cell: Cell, operands: Operands, ops: RankOps) -> list[Variant]:
        shards = _Shards(cell, operands, ops)
        y = self._sum_buffer(cell, operands, ops)

        def body(reduce: bool) -> Callable[[], None]:
            def enqueue() -> None:
                for pair in shards.pairs:
                    ops.mm(y if pair else shards.x, shards.a[pair], shards.hidden)
                    ops.mm(shards.hidden, shards.b[pair], y)
                    if reduce:
                        self._reduce(ops, y)

            return enqueue

        return [
            Variant("whole batch", body(True), lambda: [Piece(y)], [shards.hidden, y]),
            Variant("without all-reduce", body(False), lambda: (), compute_only=True, checked=False),
        ]

    def _sum_buffer(self, cell: Cell, operands: Operands, ops: RankOps) -> torch.Tensor:
        raise NotImplementedError

    def _reduce(self, ops: RankOps, y: torch.Tensor) -> None:
        raise NotImplementedError


class RankTensorParallel(_AllReduce):
    """NCCL's all-reduce."""

    name = "tp-nccl"

    def _sum_buffer(self, cell: Cell, operands: Operands, ops: RankOps) -> torch.Tensor:
        return operands.buffer("sum", ops.rank, cell.widths[2])[: cell.m]

    def _reduce(self, ops: RankOps, y: torch.Tensor) -> None:
        ops.all_reduce(y)


class RankTwoShot(_AllReduce):
    """A two-shot all-reduce over symmetric memory: the second GEMM writes there directly."""

    name = "tp-two-shot"

    def _sum_buffer(self, cell: Cell, operands: Operands, ops: RankOps) -> torch.Tensor:
        return ops.symmetric(operands.rows, cell.widths[2])[: cell.m]

    def _reduce(self, ops: RankOps, y: torch.Tensor) -> None:
        ops.two_shot_all_reduce(y)


class _AsyncTensorParallel:
    name = ""
    lives = Lives(x="", y="")
    gathered = False

    def refusal(self, cell: Cell) -> str | None:
        return refuse_unless(several_gpus(cell), even_layers(cell), columns_divide(cell), rows_divide(cell))

    def variants(self, cell: Cell, operands: Operands, ops: RankOps) -> list[Variant]:
        shards = _Shards(cell, operands, ops)
        rows = cell.m // ops.world
        x = shards.x[ops.rank * rows : (ops.rank + 1) * rows] if self.gathered else shards.x
        made: list[torch.Tensor] = []

        def enqueue() -> None:
            y = x
            for pair in shards.pairs:
                if pair or self.gathered:
                    hidden = ops.gather_mm(y, shards.a[pair])
                else:
                    hidden = shards.hidden
                    ops.mm(y, shards.a[pair], hidden)
                y = ops.mm_reduce_scatter(hidden, shards.b[pair])
            made[:] = [y]  # in a capture: the memory that every replay writes

        return [Variant("whole batch", enqueue, lambda: [Piece(made[0], first_row=ops.rank * rows)], [shards.hidden])]


class RankAsyncTensorParallel(_AsyncTensorParallel):
    """X on every GPU; GEMM, then GEMM with reduce-scatter."""

    name = "async-tp"
    lives = Lives(x="on every GPU", y="every GPU its rows", replicated="X")


class RankAsyncTensorParallelGathered(_AsyncTensorParallel):
    """X cut by rows: all-gather with GEMM, then GEMM with reduce-scatter."""

    name = "async-tp-gathered"
    lives = Lives(x="every GPU its rows", y="every GPU its rows")
    gathered = True
