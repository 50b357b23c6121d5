"""Micro-batching: a layer per GPU, the batch cut in chunks of rows that follow each other through the GPUs.

Two ways to hand a chunk on. *direct*, the paper's: the GEMM writes its chunk straight into the next GPU's memory.
*copy*: the GEMM writes locally and the copy engine carries the chunk over while the next chunk is computed.
Every chunk size is a variant; the best one counts, the whole sweep is kept.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tilerelay.baselines.cell import Cell
from tilerelay.baselines.lanes import Lanes
from tilerelay.baselines.method import (
    Lives,
    Piece,
    Variant,
    chunk_sizes,
    layers_fill_gpus,
    refuse_unless,
    row_chunks,
    several_gpus,
)
from tilerelay.baselines.operands import Operands
from tilerelay.baselines.sequential import gpu_of_layer


class _MicroBatch:
    name = ""
    lives = Lives(x="GPU 0", y="the last GPU")

    def refusal(self, cell: Cell) -> str | None:
        some_chunk = bool(chunk_sizes(cell.m)), f"{cell.m} rows cannot be cut in chunks of 256 or more"
        return refuse_unless(several_gpus(cell), layers_fill_gpus(cell), some_chunk)

    def variants(self, cell: Cell, operands: Operands, lanes: Lanes) -> list[Variant]:
        homes = gpu_of_layer(cell)
        weights = [operands.weight(layer, gpu) for layer, gpu in enumerate(homes)]
        # Layer i's output, whole, where its reader is (for the last layer: where it is made).
        targets = [
            operands.buffer(f"stage{i}", homes[min(i + 1, cell.layers - 1)], cell.widths[i + 1])[: cell.m]
            for i in range(cell.layers)
        ]
        make = self._chunk_of_layer(cell, operands, lanes, homes, weights, targets)

        def body(size: int) -> Callable[[], None]:
            def enqueue() -> None:
                for rows in row_chunks(cell.m, size):
                    for layer in range(cell.layers):
                        make(layer, rows)

            return enqueue

        return [
            Variant(f"chunks of {size}", body(size), lambda: [Piece(targets[-1])], targets, chunk=size)
            for size in chunk_sizes(cell.m)
        ]

    def _chunk_of_layer(
        self,
        cell: Cell,
        operands: Operands,
        lanes: Lanes,
        homes: list[int],
        weights: list[torch.Tensor],
        targets: list[torch.Tensor],
    ) -> Callable[[int, slice], None]:
        """A function that enqueues one layer of one chunk and hands the result on."""
        raise NotImplementedError


class MicroBatchDirect(_MicroBatch):
    """cuBLAS writes each chunk straight into the next GPU's memory."""

    name = "microbatch-direct"

    def _chunk_of_layer(
        self,
        cell: Cell,
        operands: Operands,
        lanes: Lanes,
        homes: list[int],
        weights: list[torch.Tensor],
        targets: list[torch.Tensor],
    ) -> Callable[[int, slice], None]:
        x = operands.x(0)[: cell.m]
        readers = [*homes[1:], homes[-1]]
        writable = [t if r == h else lanes.peer_view(t, h) for t, h, r in zip(targets, homes, readers, strict=True)]

        def make(layer: int, rows: slice) -> None:
            home, reader = homes[layer], readers[layer]
            lanes.mm(home, (targets[layer - 1] if layer else x)[rows], weights[layer], writable[layer][rows])
            if reader != home:
                lanes.wait(reader, "main", lanes.mark(home, "main"))

        return make


class MicroBatchCopy(_MicroBatch):
    """The copy engine carries each chunk over, on its own stream."""

    name = "microbatch-copy"

    def _chunk_of_layer(
        self,
        cell: Cell,
        operands: Operands,
        lanes: Lanes,
        homes: list[int],
        weights: list[torch.Tensor],
        targets: list[torch.Tensor],
    ) -> Callable[[int, slice], None]:
        x = operands.x(0)[: cell.m]
        readers = [*homes[1:], homes[-1]]
        made = [
            t if r == h else operands.buffer(f"made{i}", h, t.shape[1])[: cell.m]
            for i, (t, h, r) in enumerate(zip(targets, homes, readers, strict=True))
        ]

        def make(layer: int, rows: slice) -> None:
            home, reader = homes[layer], readers[layer]
            lanes.mm(home, (targets[layer - 1] if layer else x)[rows], weights[layer], made[layer][rows])
            if reader != home:
                lanes.wait(home, "copy", lanes.mark(home, "main"))
                lanes.send(home, made[layer][rows], reader, targets[layer][rows])
                lanes.wait(reader, "main", lanes.mark(reader, "receive"))

        return make
