"""Weight streaming: the batch cut by rows, the weights cut over the GPUs and copied to everyone under the GEMMs.

Every GPU owns 1/n of each weight and M/n rows. Copies depend on nothing, so all of them start with the graph, layer
after layer; a GEMM starts with the shard that its GPU owns and takes the others as they come. Needs M large enough to
hide the copies, room for all weights of the chain on every GPU, and nobody else on the links.
"""

from __future__ import annotations

from collections.abc import Callable

from tilerelay.baselines.cell import Cell
from tilerelay.baselines.lanes import Lanes
from tilerelay.baselines.method import Lives, Piece, Variant, columns_divide, refuse_unless, rows_divide, several_gpus
from tilerelay.baselines.operands import Operands


class WeightStreaming:
    """Two variants: every layer shard by shard, or the later layers whole, once their weight is there."""

    name = "weight-streaming"
    lives = Lives(x="every GPU its rows", y="every GPU its rows", replicated="all weights, copied anew in every run")

    def refusal(self, cell: Cell) -> str | None:
        return refuse_unless(several_gpus(cell), rows_divide(cell), columns_divide(cell))

    def variants(self, cell: Cell, operands: Operands, lanes: Lanes) -> list[Variant]:
        rows = cell.m // cell.gpus
        gpus, layers = range(cell.gpus), range(cell.layers)
        own = [[operands.column_shard(layer, g, g, cell.gpus) for g in gpus] for layer in layers]
        # A whole weight per layer and GPU. Its own shard is put there once, now: it never travels.
        whole = [
            [operands.buffer(f"weight{layer}", g, cell.widths[layer], cell.widths[layer + 1]) for g in gpus]
            for layer in layers
        ]
        columns = [[_part(cell.widths[layer + 1], g, cell.gpus) for g in gpus] for layer in layers]
        for layer in layers:
            for g in gpus:
                whole[layer][g][columns[layer][g]].copy_(own[layer][g])
        outs = [
            [operands.buffer(f"layer{layer % 2}", g, cell.widths[layer + 1])[:rows] for g in gpus] for layer in layers
        ]

        def body(later_whole: bool) -> Callable[[], None]:
            def enqueue() -> None:
                come: dict[tuple[int, int, int], object] = {}
                for layer in layers:
                    for step in range(1, cell.gpus):
                        for g in gpus:
                            source = (g + step) % cell.gpus
                            lanes.send(source, own[layer][source], g, whole[layer][g][columns[layer][source]])
                            come[layer, g, source] = lanes.mark(g, "receive")
                for layer in layers:
                    for g in gpus:
                        x = outs[layer - 1][g] if layer else operands.x(g)[g * rows : (g + 1) * rows]
                        order = [(g + step) % cell.gpus for step in range(cell.gpus)]
                        if later_whole and layer:
                            for source in order[1:]:
                                lanes.wait(g, "main", come[layer, g, source])
                            lanes.mm(g, x, whole[layer][g], outs[layer][g])
                            continue
                        for source in order:
                            if source != g:
                                lanes.wait(g, "main", come[layer, g, source])
                            part = columns[layer][source]
                            lanes.mm(g, x, whole[layer][g][part], outs[layer][g][:, part])

            return enqueue

        def pieces() -> list[Piece]:
            return [Piece(outs[-1][g], first_row=g * rows) for g in gpus]

        # Shards that come from elsewhere must come anew in each run; the GPU's own part of the buffer stays.
        poison = [out for layer in outs for out in layer]
        poison += [whole[layer][g][columns[layer][s]] for layer in layers for g in gpus for s in gpus if s != g]
        kinds = {"shard by shard": False, "later layers whole": True} if cell.layers > 1 else {"shard by shard": False}
        return [Variant(label, body(later), pieces, poison) for label, later in kinds.items()]


def _part(width: int, part: int, parts: int) -> slice:
    size = width // parts
    return slice(part * size, (part + 1) * size)
