"""Stages and the workload graph that they form."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from tilerelay.errors import InvalidInput
from tilerelay.graph.dependency import TileDependencies, gemm_dependencies
from tilerelay.graph.tiling import LARGEST, Int32s, TileGrid, grouped_order, permutation_order
from tilerelay.graph.walk import Walk, even_walk, is_thin

ACTIVATIONS = ("none", "relu", "gelu", "silu")
DTYPES = ("bf16", "fp16")


@dataclass(frozen=True, eq=False)
class Stage:
    """One kernel of the chain: `out[M, N] = activation(in[M, K] @ weight[N, K].T + bias[N])`.

    Attributes:
        grid: tiles of the output.
        k: length of the sum.
        order: tile ids in the order of computation, used when the stage chooses it itself (first stages, counter
            signalling); None: the pipeline chooses (`with_orders`).
        walk: which pieces of the tiles each CTA computes; None: whole tiles, in this order, each taken by the next CTA.
            Made by the pipeline.
        under_way: how many tiles are sent to other devices at once, in the order of computation; None: each tile when
            it is computed. Made by the pipeline (`graph.turns`).
    """

    name: str
    grid: TileGrid
    k: int
    activation: str = "none"
    bias: bool = False
    order: Int32s | None = None
    walk: Walk | None = None
    under_way: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.k, int) or not 0 < self.k <= LARGEST:
            raise InvalidInput(f"stage {self.name}: k={self.k}: sizes must be positive and below 2**31")
        if self.activation not in ACTIVATIONS:
            raise InvalidInput(
                f"stage {self.name}: unknown activation {self.activation!r}; choose one of {', '.join(ACTIVATIONS)}"
            )
        if self.under_way is not None and (self.under_way < 1 or self.walk is not None):
            raise InvalidInput(f"stage {self.name}: under_way={self.under_way}: at least one tile, and not with a walk")
        if self.order is not None:
            object.__setattr__(self, "order", permutation_order(self.grid, self.order))

    @property
    def flops(self) -> int:
        return 2 * self.grid.m * self.grid.n * self.k


@dataclass(frozen=True, eq=False)
class Edge:
    """The tensor that stage `producer` hands to stage `consumer`, and the tiles' dependencies through it."""

    producer: int
    consumer: int
    dependencies: TileDependencies


@dataclass(frozen=True, eq=False)
class Workload:
    """Stages in an order in which producers come before consumers, and the edges between them."""

    stages: tuple[Stage, ...]
    edges: tuple[Edge, ...]
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        if not self.stages:
            raise InvalidInput("the workload has no stage; give at least one")
        if self.dtype not in DTYPES:
            raise InvalidInput(f"unknown dtype {self.dtype!r}; choose one of {', '.join(DTYPES)}")
        for edge in self.edges:
            if not 0 <= edge.producer < edge.consumer < len(self.stages):
                raise InvalidInput(
                    f"edge {edge.producer} -> {edge.consumer}: list the stages so that producers come before consumers"
                )
            made, read = self.stages[edge.producer].grid.tiles, self.stages[edge.consumer].grid.tiles
            if (edge.dependencies.num_producers, edge.dependencies.num_consumers) != (made, read):
                raise InvalidInput(
                    f"edge {edge.producer} -> {edge.consumer}: the dependencies do not match the stages' "
                    f"{made} -> {read} tiles; build them from the stages' grids"
                )

    @property
    def is_chain(self) -> bool:
        """Every stage but the first reads exactly the stage before it."""
        return [(e.producer, e.consumer) for e in self.edges] == [(i, i + 1) for i in range(len(self.stages) - 1)]

    @property
    def flops(self) -> int:
        return sum(stage.flops for stage in self.stages)

    @property
    def tiles(self) -> int:
        return sum(stage.grid.tiles for stage in self.stages)


L2_PANELS = 8  # row panels that share 256 columns of weights in L2 when nobody waits for the first panels
CUT_PANELS = 4  # the same, for parts of a cut stage: their panels are read long after they are made
PANEL_SHARE = 8  # of a stage that is read at once, at most this fraction of the panels is made together


def with_orders(workload: Workload, tiles_in_flight: Sequence[int], cut: Sequence[bool] = ()) -> Workload:
    """The workload with a tile order for every stage that has none: some row panels at a time, column by column.

    Weight tiles are re-used in L2 over the panels that are computed together. Panels that are in flight together
    complete together, so among them this costs no latency. Where a panel has more tiles than that, the first panel
    comes later, but all weights come from memory once for several panels instead of for each.

    Args:
        tiles_in_flight: for each stage, how many tiles its device computes at once.
        cut: for each stage, whether it is a part of a cut stage.
    """
    linked = {i for edge in workload.edges for i in (edge.producer, edge.consumer)}

    def together(index: int, grid: TileGrid) -> int:
        if index not in linked:
            return max(1, L2_PANELS * grid.block_n // 256)
        least = CUT_PANELS if cut and cut[index] else min(CUT_PANELS, grid.rows // PANEL_SHARE)
        return max(1, least, tiles_in_flight[index] // grid.cols)

    def ordered(index: int, stage: Stage) -> Stage:
        if stage.order is not None:
            return stage
        return replace(stage, order=grouped_order(stage.grid, together(index, stage.grid)))

    return replace(workload, stages=tuple(ordered(i, stage) for i, stage in enumerate(workload.stages)))


def with_walk(stage: Stage, sms: int, *, unit: int) -> Stage:
    """The stage with even work for all CTAs where its last wave is thin (see `graph.walk`); else as it is.

    Args:
        sms: CTAs that are computed at once.
        unit: sums are cut at multiples of this.
    """
    panels = math.gcd(stage.grid.rows, CUT_PANELS)
    if not is_thin(stage.grid.tiles, sms) or sms < CUT_PANELS:
        return stage
    order = grouped_order(stage.grid, panels)
    ctas = sms // CUT_PANELS * CUT_PANELS  # the same for all stages of a kernel
    walk = even_walk(order, stage.k, ctas, together=panels, unit=unit)
    return replace(stage, order=order, walk=walk) if walk else stage


def chain(stages: Sequence[Stage], *, dtype: str = "bf16", grouped: bool = True) -> Workload:
    """A workload in which stage i + 1 reads the output of stage i.

    Args:
        grouped: one counter per row panel; False: one per consumer tile (the paper's general case).

    Raises:
        InvalidInput: a stage's k is not the n of the stage before it, or rows differ.
    """
    for before, after in pairwise(stages):
        if after.k != before.grid.n:
            raise InvalidInput(
                f"stage {after.name} reads k={after.k} columns, {before.name} makes n={before.grid.n}; make both equal"
            )
    edges = tuple(
        Edge(i, i + 1, gemm_dependencies(before.grid, after.grid, grouped=grouped))
        for i, (before, after) in enumerate(pairwise(stages))
    )
    return Workload(tuple(stages), edges, dtype)
