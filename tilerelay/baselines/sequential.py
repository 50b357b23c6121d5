"""Layer by layer: all layers on one GPU, or a layer per GPU with a copy in between. Nothing overlaps."""

from __future__ import annotations

from tilerelay.baselines.cell import Cell
from tilerelay.baselines.lanes import Lanes
from tilerelay.baselines.method import Lives, Piece, Variant, layers_fill_gpus, refuse_unless, several_gpus
from tilerelay.baselines.operands import Operands


class Sequential:
    """All layers on the first GPU; the others idle."""

    name = "sequential"
    lives = Lives(x="GPU 0", y="GPU 0")

    def refusal(self, cell: Cell) -> str | None:
        return None

    def variants(self, cell: Cell, operands: Operands, lanes: Lanes) -> list[Variant]:
        weights = [operands.weight(layer, 0) for layer in range(cell.layers)]
        outs = [operands.buffer(f"layer{i % 2}", 0, w.shape[0])[: cell.m] for i, w in enumerate(weights)]

        def enqueue() -> None:
            x = operands.x(0)[: cell.m]
            for weight, out in zip(weights, outs, strict=True):
                lanes.mm(0, x, weight, out)
                x = out

        return [Variant("one GPU", enqueue, lambda: [Piece(outs[-1])], outs)]


class SequentialCopy:
    """A layer per GPU; a GPU starts when the copy of the whole batch has come."""

    name = "sequential-copy"
    lives = Lives(x="GPU 0", y="the last GPU")

    def refusal(self, cell: Cell) -> str | None:
        return refuse_unless(several_gpus(cell), layers_fill_gpus(cell))

    def variants(self, cell: Cell, operands: Operands, lanes: Lanes) -> list[Variant]:
        homes = gpu_of_layer(cell)
        weights = [operands.weight(layer, gpu) for layer, gpu in enumerate(homes)]
        outs = [operands.buffer(f"layer{i % 2}", gpu, weights[i].shape[0])[: cell.m] for i, gpu in enumerate(homes)]
        come = {
            gpu: operands.buffer("come", gpu, cell.widths[homes.index(gpu)])[: cell.m] for gpu in range(1, cell.gpus)
        }

        def enqueue() -> None:
            x = operands.x(0)[: cell.m]
            for layer, gpu in enumerate(homes):
                lanes.mm(gpu, x, weights[layer], outs[layer])
                x = outs[layer]
                if layer + 1 < cell.layers and homes[layer + 1] != gpu:
                    lanes.wait(gpu, "copy", lanes.mark(gpu, "main"))
                    lanes.send(gpu, x, gpu + 1, come[gpu + 1])
                    lanes.wait(gpu + 1, "main", lanes.mark(gpu + 1, "receive"))
                    x = come[gpu + 1]

        return [Variant("whole batch", enqueue, lambda: [Piece(outs[-1])], [*outs, *come.values()])]


def gpu_of_layer(cell: Cell) -> list[int]:
    """Neighbouring layers on one GPU, as evenly as they go: [layers]."""
    return [layer * cell.gpus // cell.layers for layer in range(cell.layers)]
