"""Random workload graphs for the protocol's tests."""

from __future__ import annotations

from hypothesis import strategies as st

from tilerelay.graph.dependency import from_prerequisites
from tilerelay.graph.placement import Part, Placement
from tilerelay.graph.tiling import TileGrid
from tilerelay.graph.workload import Edge, Stage, Workload

# Around both places where an int32 epoch changes its look, and the usual start.
EPOCHS = (1, 2**31 - 2, 2**32 - 2)


@st.composite
def workloads(draw: st.DrawFn, max_stages: int = 4, max_tiles: int = 7) -> Workload:
    """Any DAG: every later stage reads one to three earlier ones through any map of tiles."""
    tiles = draw(st.lists(st.integers(1, max_tiles), min_size=1, max_size=max_stages))
    stages = tuple(
        Stage(f"s{i}", TileGrid(1, n, 1, 1), 1, order=draw(st.none() | st.permutations(range(n))))
        for i, n in enumerate(tiles)
    )
    edges = []
    for consumer in range(1, len(stages)):
        for producer in sorted(draw(st.sets(st.integers(0, consumer - 1), min_size=1, max_size=3))):
            needs = st.sets(st.integers(0, tiles[producer] - 1), min_size=1)
            kinds = draw(st.lists(needs, min_size=1, max_size=3))
            wanted = draw(st.lists(st.sampled_from(kinds), min_size=tiles[consumer], max_size=tiles[consumer]))
            edges.append(
                Edge(producer, consumer, from_prerequisites(tiles[producer], wanted, grouped=draw(st.booleans())))
            )
    return Workload(stages, tuple(edges))


@st.composite
def placements(draw: st.DrawFn, stages: int) -> Placement:
    """Every stage on any of three devices, as a share of it."""
    return Placement(tuple((Part(draw(st.integers(0, 2)), 4),) for _ in range(stages)))


@st.composite
def cuts(draw: st.DrawFn, workload: Workload) -> Placement:
    """Every stage cut by columns into up to four parts, on any of four devices."""
    stages = []
    for stage in workload.stages:
        inner = draw(st.sets(st.sampled_from(range(8, stage.grid.n, 8)), max_size=3))
        bounds = [0, *sorted(inner), stage.grid.n]
        devices = draw(st.permutations(range(4)))
        stages.append(tuple(Part(devices[i], None, (bounds[i], bounds[i + 1])) for i in range(len(bounds) - 1)))
    return Placement(tuple(stages))
