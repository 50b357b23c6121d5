"""Tensor parallelism, Megatron style: A by columns, B by rows, an all-reduce after every two layers (NCCL).

tp-nccl is the plain form. tp-nccl-chunked cuts the batch and runs the all-reduce of one chunk under the GEMMs of the
next. tp-nccl also times its GEMMs without the all-reduce: the computation part of the breakdown.
"""

from __future__ import annotations

from collections.abc import Callable

from tilerelay.baselines.cell import Cell
from tilerelay.baselines.lanes import Lanes
from tilerelay.baselines.method import (
    Lives,
    Piece,
    Variant,
    chunk_sizes,
    columns_divide,
    even_layers,
    refuse_unless,
    row_chunks,
    several_gpus,
)
from tilerelay.baselines.operands import Operands

LIVES = Lives(x="on every GPU", y="on every GPU", replicated="X, every second layer's output, Y")


class _Shards:
    """Every GPU's shards and buffers, and the two GEMMs of a pair of layers on some rows."""

    def __init__(self, cell: Cell, operands: Operands, lanes: Lanes) -> None:
        self.cell, self.lanes, self.gpus = cell, lanes, range(cell.gpus)
        self.pairs = range(0, cell.layers, 2)
        self.a = [[operands.column_shard(p, g, g, cell.gpus) for g in self.gpus] for p in self.pairs]
        self.b = [[operands.row_shard(p + 1, g, g, cell.gpus) for g in self.gpus] for p in self.pairs]
        self.x = [operands.x(g)[: cell.m] for g in self.gpus]
        self.hidden = [operands.buffer("hidden", g, self.a[0][g].shape[0])[: cell.m] for g in self.gpus]
        # All pairs' sums land in the same buffer: a pair's first GEMM has read it before its second one writes it.
        self.sums = [operands.buffer("sum", g, cell.widths[2])[: cell.m] for g in self.gpus]

    def gemms(self, pair: int, rows: slice) -> None:
        for g in self.gpus:
            x = self.sums[g] if pair else self.x[g]
            self.lanes.mm(g, x[rows], self.a[pair][g], self.hidden[g][rows])
            self.lanes.mm(g, self.hidden[g][rows], self.b[pair][g], self.sums[g][rows])

    def pieces(self) -> list[Piece]:
        return [Piece(y) for y in self.sums]


class TensorParallel:
    """GEMM, GEMM, all-reduce; nothing overlaps."""

    name = "tp-nccl"
    lives = LIVES

    def refusal(self, cell: Cell) -> str | None:
        return refuse_unless(several_gpus(cell), even_layers(cell), columns_divide(cell))

    def variants(self, cell: Cell, operands: Operands, lanes: Lanes) -> list[Variant]:
        shards = _Shards(cell, operands, lanes)

        def body(reduce: bool) -> Callable[[], None]:
            def enqueue() -> None:
                for pair in range(len(shards.pairs)):
                    shards.gemms(pair, slice(0, cell.m))
                    if reduce:
                        lanes.all_reduce(dict(enumerate(shards.sums)), "main")

            return enqueue

        return [
            Variant("whole batch", body(True), shards.pieces, [*shards.hidden, *shards.sums]),
            Variant("without all-reduce", body(False), lambda: (), compute_only=True, checked=False),
        ]


class TensorParallelChunked:
    """The all-reduce of one chunk runs under the GEMMs of the next."""

    name = "tp-nccl-chunked"
    lives = LIVES

    def refusal(self, cell: Cell) -> str | None:
        some_chunk = bool(chunk_sizes(cell.m)), f"{cell.m} rows cannot be cut in chunks of 256 or more"
        return refuse_unless(several_gpus(cell), even_layers(cell), columns_divide(cell), some_chunk)

    def variants(self, cell: Cell, operands: Operands, lanes: Lanes) -> list[Variant]:
        shards = _Shards(cell, operands, lanes)

        def body(size: int) -> Callable[[], None]:
            chunks = row_chunks(cell.m, size)

            def enqueue() -> None:
                summed: dict[int, list[object]] = {}
                for pair in range(len(shards.pairs)):
                    for i, rows in enumerate(chunks):
                        for g, mark in enumerate(summed.get(i, [])):
                            lanes.wait(g, "main", mark)
                        shards.gemms(pair, rows)
                        for g in shards.gpus:
                            lanes.wait(g, "copy", lanes.mark(g, "main"))
                        lanes.all_reduce({g: y[rows] for g, y in enumerate(shards.sums)}, "copy")
                        summed[i] = [lanes.mark(g, "copy") for g in shards.gpus]

            return enqueue

        return [
            Variant(f"chunks of {size}", body(size), shards.pieces, [*shards.hidden, *shards.sums], chunk=size)
            for size in chunk_sizes(cell.m)
        ]
