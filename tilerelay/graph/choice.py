"""Which placement and tile shape to take when the user leaves it open: a small cost model, measured on two H200 GPUs.

A wave is one tile on every SM of a device. A stage takes ceil(tiles / SMs) waves, a wave as long as its tile's area
times K. Pipelined stages overlap but for one wave each; parts of cut stages follow each other. What the model leaves
out is measured and written down: docs/notes-sharded.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilerelay.graph.placement import Placement, pipelined, sharded
from tilerelay.graph.tiling import TileGrid

TILES = ((128, 256), (128, 128))
H200_SMS = 132
# The small tile moves more bytes through L2 for a product. With few waves that shows; with many it is ahead, since it
# draws less power under the cap (measured: 3 % slower at 2 waves of 8192 x 8192, 1 to 2 % faster from 8 on).
FEW_WAVES = 6
SMALL_TILE_FACTOR = {"few": 1.03, "many": 0.985}


@dataclass(frozen=True)
class Choice:
    """What was picked, and the modelled cost of everything that was considered (multiply-adds of one SM)."""

    placement: Placement
    tile: tuple[int, int]
    costs: dict[str, float]

    def __str__(self) -> str:
        best = min(self.costs.values())
        others = ", ".join(f"{name} {cost / best:.2f}" for name, cost in sorted(self.costs.items(), key=lambda c: c[1]))
        return f"{self.placement.kind}, tiles of {self.tile[0]} x {self.tile[1]} (modelled cost: {others})"


def choose(m: int, widths: Sequence[int], devices: Sequence[int], *, sms: int = H200_SMS) -> Choice:
    """The cheapest of pipelined (where there is a device for each layer) and sharded, with each tile shape.

    Args:
        m: rows of the batch.
        widths: columns of the input and of every layer's output.
        devices: devices to use.
        sms: SMs of a device.

    Raises:
        PlacementError: the layers cannot be placed on these devices.
    """
    layers = list(zip(widths[1:], widths, strict=False))  # (n, k)
    options: dict[str, tuple[Placement, tuple[int, int], float]] = {}
    for tile in TILES:
        name = f"{tile[0]} x {tile[1]}"
        if len(devices) >= len(layers):
            waves = [_wave_cost(m, n, k, tile, sms) for n, k in layers]
            cost = max(count * wave for count, wave in waves) + sum(wave for _, wave in waves[1:])
            options[f"pipelined {name}"] = pipelined(devices[: len(layers)]), tile, cost
        if len(devices) > 1:
            placement = sharded(widths[1:], devices)
            widest = [max(end - first for first, end in _columns(parts)) for parts in placement.stages]
            waves = [_wave_cost(m, n, k, tile, sms) for n, (_, k) in zip(widest, layers, strict=True)]
            options[f"sharded {name}"] = placement, tile, sum(count * wave for count, wave in waves)
    if not options:
        options["pipelined"] = pipelined(devices), TILES[0], 0.0  # raises where one device cannot hold the layers
    best = min(options, key=lambda name: options[name][2])
    placement, tile, _ = options[best]
    return Choice(placement, tile, {name: cost for name, (_, _, cost) in options.items()})


def _columns(parts: Sequence[object]) -> list[tuple[int, int]]:
    return [part.columns for part in parts]  # type: ignore[attr-defined]


def _wave_cost(m: int, n: int, k: int, tile: tuple[int, int], sms: int) -> tuple[int, float]:
    """(waves, cost of one) of an [m, n] output with sums over k."""
    waves = -(-TileGrid(m, n, *tile).tiles // sms)
    factor = 1.0 if tile == TILES[0] else SMALL_TILE_FACTOR["few" if waves <= FEW_WAVES else "many"]
    return waves, tile[0] * tile[1] * k * factor
