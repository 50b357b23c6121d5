"""Stages and the workload graph that they form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from tilerelay.errors import InvalidInput
from tilerelay.graph.dependency import TileDependencies, gemm_dependencies
from tilerelay.graph.tiling import Int32s, TileGrid, grouped_order, permutation_order

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
    """

    name: str
    grid: TileGrid
    k: int
    activation: str = "none"
    bias: bool = False
    order: Int32s | None = None

    def __post_init__(self) -> None:
        if self.k <= 0:
            raise InvalidInput(f"stage {self.name}: k={self.k}: sizes must be positive")
        if self.activation not in ACTIVATIONS:
            raise InvalidInput(
                f"stage {self.name}: unknown activation {self.activation!r}; choose one of {', '.join(ACTIVATIONS)}"
            )
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


L2_PANELS = 8  # row panels that share weight tiles in L2 when nobody waits for the first panels


def with_orders(workload: Workload, tiles_in_flight: Sequence[int], least_panels: Sequence[int] = ()) -> Workload:
    """The workload with a tile order for every stage that has none.

    Panels that are in flight together complete together, so within them the order is free and goes column by column:
    weight tiles are re-used in L2 at no cost in latency. A stage that stands alone takes `L2_PANELS` at a time.

    Args:
        tiles_in_flight: for each stage, how many tiles its device computes at once.
        least_panels: for each stage, panels to take together even where they complete one after the other.
    """
    linked = {i for edge in workload.edges for i in (edge.producer, edge.consumer)}

    def ordered(index: int, stage: Stage) -> Stage:
        if stage.order is not None:
            return stage
        least = least_panels[index] if least_panels else 1
        together = max(least, tiles_in_flight[index] // stage.grid.cols) if index in linked else L2_PANELS
        return replace(stage, order=grouped_order(stage.grid, together))

    return replace(workload, stages=tuple(ordered(i, stage) for i, stage in enumerate(workload.stages)))


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
