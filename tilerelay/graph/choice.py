"""Which placement and tile shape to take when the user leaves it open: a small cost model, measured on two H200 GPUs.

A wave is one tile on every SM of a device. A stage takes ceil(tiles / SMs) waves, or a fraction where CTAs share sums
(`graph.walk`), a wave as long as its tile's area times K. Pipelined stages overlap but for one wave each; parts of cut
stages follow each other. What the model leaves out is measured and written down: docs/notes.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilerelay.errors import PlacementError
from tilerelay.graph.placement import Placement, pipelined, sharded
from tilerelay.graph.tiling import TileGrid
from tilerelay.graph.walk import is_thin

KINDS = ("pipelined", "sharded")
TILES = ((128, 256), (128, 128))
H200_SMS = 132
# Measured after a rest: the small tile is up to 12 % slower, the more the larger the batch. (In runs one after the
# other, against the power cap, it is as fast, or up to 4 % faster.)
SMALL_TILE_FACTOR = 1.05
SHARED_SUMS_FACTOR = 1.06  # handing sums over between CTAs


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


def choose(
    m: int, widths: Sequence[int], devices: Sequence[int], *, kinds: Sequence[str] = KINDS, sms: int = H200_SMS
) -> Choice:
    """The cheapest of pipelined (where there is a device for each layer) and sharded, with each tile shape.

    Args:
        m: rows of the batch.
        widths: columns of the input and of every layer's output.
        devices: devices to use.
        kinds: of placements, those to choose from.
        sms: SMs of a device.

    Raises:
        PlacementError: the layers cannot be placed on these devices.
    """
    layers = list(zip(widths[1:], widths, strict=False))  # (n, k)
    options: dict[str, tuple[Placement, tuple[int, int], float]] = {}
    for tile in TILES:
        name = f"{tile[0]} x {tile[1]}"
        if "pipelined" in kinds and len(devices) >= len(layers):
            waves = [_wave_cost(m, n, k, tile, sms, shares_sums=False) for n, k in layers]
            cost = max(count * wave for count, wave in waves) + sum(wave for _, wave in waves[1:])
            options[f"pipelined {name}"] = pipelined(devices[: len(layers)]), tile, cost
        if "sharded" in kinds and len(devices) > 1:
            placement = sharded(widths[1:], devices)
            widest = [max(p.columns[1] - p.columns[0] for p in parts if p.columns) for parts in placement.stages]
            shards = zip(widest, layers, strict=True)
            waves = [_wave_cost(m, n, k, tile, sms, shares_sums=True) for n, (_, k) in shards]
            options[f"sharded {name}"] = placement, tile, sum(count * wave for count, wave in waves)
    if not options:
        raise PlacementError(
            f"{len(layers)} layers on {len(devices)} device: nothing to choose; give more devices, or SM shares"
        )
    best = min(options, key=lambda name: options[name][2])
    placement, tile, _ = options[best]
    return Choice(placement, tile, {name: cost for name, (_, _, cost) in options.items()})


def choose_tile(m: int, n: int, k: int, *, sms: int = H200_SMS) -> tuple[int, int]:
    """The tile shape with which one GPU computes an [m, n] output with sums over k in the least time."""

    def cost(tile: tuple[int, int]) -> float:
        waves, wave = _wave_cost(m, n, k, tile, sms, shares_sums=True)
        return waves * wave

    return min(TILES, key=cost)


def _wave_cost(m: int, n: int, k: int, tile: tuple[int, int], sms: int, *, shares_sums: bool) -> tuple[float, float]:
    """(waves, cost of one) of an [m, n] output with sums over k."""
    tiles = TileGrid(m, n, *tile).tiles
    waves = SHARED_SUMS_FACTOR * tiles / sms if shares_sums and is_thin(tiles, sms) else -(-tiles // sms)
    return waves, tile[0] * tile[1] * k * (1.0 if tile == TILES[0] else SMALL_TILE_FACTOR)
