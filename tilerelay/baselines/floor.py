"""The floor: the same FLOPs with cuBLAS on all GPUs at once and no communication: the least to expect.

Three cuts of the work, the least of which is the floor: a layer per GPU, every layer by columns, the batch by rows.
Which one wins depends on the shape: small GEMMs fill a GPU badly, wide ones suit the caches better.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tilerelay.baselines.cell import Cell
from tilerelay.baselines.lanes import Lanes
from tilerelay.baselines.method import Lives, Variant, columns_divide, layers_fill_gpus, rows_divide
from tilerelay.baselines.operands import Operands

Gemm = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def layer_per_gpu(cell: Cell, operands: Operands, gpu: int) -> list[Gemm]:
    """(x, w, out) of the GEMMs of one GPU when each GPU computes whole layers, from inputs that are already there."""
    gemms = []
    for layer in range(gpu, cell.layers, cell.gpus):
        x = operands.filled(gpu, cell.widths[layer])[: cell.m]
        gemms.append((x, operands.weight(layer, gpu), operands.buffer("out", gpu, cell.widths[layer + 1])[: cell.m]))
    return gemms


def by_columns(cell: Cell, operands: Operands, gpu: int) -> list[Gemm]:
    """... when each GPU computes its columns of every layer."""
    gemms = []
    for layer in range(cell.layers):
        shard = operands.column_shard(layer, gpu, gpu, cell.gpus)
        out = operands.buffer("columns", gpu, shard.shape[0])[: cell.m]
        gemms.append((operands.filled(gpu, cell.widths[layer])[: cell.m], shard, out))
    return gemms


def by_rows(cell: Cell, operands: Operands, gpu: int) -> list[Gemm]:
    """... when each GPU computes its rows of every layer, with all weights at hand."""
    rows = cell.m // cell.gpus
    x = operands.x(gpu)[gpu * rows : (gpu + 1) * rows]
    gemms = []
    for layer in range(cell.layers):
        out = operands.buffer(f"layer{layer % 2}", gpu, cell.widths[layer + 1])[:rows]
        gemms.append((x, operands.weight(layer, gpu), out))
        x = out
    return gemms


def cuts(cell: Cell) -> dict[str, Callable[[Cell, Operands, int], list[Gemm]]]:
    """The cuts that fit the cell, by name."""
    rules = {
        "layer per GPU": (layer_per_gpu, layers_fill_gpus),
        "cut by columns": (by_columns, columns_divide),
        "cut by rows": (by_rows, rows_divide),
    }
    return {name: cut for name, (cut, fits) in rules.items() if fits(cell)[0]}


LIVES = Lives(x="on every GPU", y="nowhere: nothing is put together", replicated="X and all weights")


class Floor:
    """See the module."""

    name = "floor"
    lives = LIVES

    def refusal(self, cell: Cell) -> str | None:
        return None if cuts(cell) else f"no cut of the work divides over {cell.gpus} GPUs"

    def variants(self, cell: Cell, operands: Operands, lanes: Lanes) -> list[Variant]:
        return [
            Variant(
                name,
                self._body(lanes, [cut(cell, operands, gpu) for gpu in range(cell.gpus)]),
                lambda: (),
                checked=False,
            )
            for name, cut in cuts(cell).items()
        ]

    @staticmethod
    def _body(lanes: Lanes, gemms: list[list[Gemm]]) -> Callable[[], None]:
        def enqueue() -> None:
            for gpu, gemms_of_gpu in enumerate(gemms):
                for x, w, out in gemms_of_gpu:
                    lanes.mm(gpu, x, w, out)

        return enqueue
