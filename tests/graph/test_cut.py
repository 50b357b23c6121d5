"""Cutting stages by columns: parts, their dependencies, the kernels that walk over them, and what cannot be cut."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilerelay.errors import InvalidInput, PlacementError
from tilerelay.graph.catalog import dense_chain
from tilerelay.graph.cut import CutWorkload, cut
from tilerelay.graph.dependency import from_prerequisites, gemm_dependencies
from tilerelay.graph.placement import Part, Placement, pipelined, sharded
from tilerelay.graph.tiling import TileGrid, grouped_order
from tilerelay.graph.workload import Edge, Stage, Workload, chain

WIDTHS = [64, 320, 136, 192]
CHAIN = dense_chain(200, WIDTHS, tile=(64, 64), activation="relu", bias=True, dtype="fp16")


@st.composite
def placements(draw: st.DrawFn, workload: Workload) -> Placement:
    """Every stage on some of eight devices, cut anywhere that multiples of eight columns allow."""
    stages = []
    for stage in workload.stages:
        points = range(8, stage.grid.n, 8)
        inner = sorted(draw(st.sets(st.sampled_from(points), max_size=min(7, len(points)))) if points else [])
        bounds = [0, *inner, stage.grid.n]
        devices = draw(st.permutations(range(8)))
        stages.append(tuple(Part(devices[i], None, (bounds[i], bounds[i + 1])) for i in range(len(bounds) - 1)))
    return Placement(tuple(stages))


@st.composite
def cases(draw: st.DrawFn) -> CutWorkload:
    """Chains of two or three stages whose tiles differ, cut."""
    m, grouped = draw(st.integers(1, 40)), draw(st.booleans())
    widths = [8 * n for n in draw(st.lists(st.integers(1, 10), min_size=3, max_size=4))]
    sizes = st.sampled_from([4, 8, 12, 32])
    stages = [Stage(f"s{i}", TileGrid(m, n, draw(sizes), draw(sizes)), k) for i, (k, n) in enumerate(pairwise(widths))]
    workload = chain(stages, grouped=grouped)
    return cut(workload, draw(placements(workload)))


def makers(placed: CutWorkload, stage: int) -> dict[tuple[int, int], tuple[int, int]]:
    """Element of an original stage's output -> (part, tile of the part) that makes it; none is made twice."""
    made: dict[tuple[int, int], tuple[int, int]] = {}
    for part in placed.parts_of(stage):
        grid, left_of_part = placed.workload.stages[part].grid, placed.columns[part][0]
        for tile in range(grid.tiles):
            top, bottom, left, right = grid.extent(tile)
            for row in range(top, bottom):
                for column in range(left_of_part + left, left_of_part + right):
                    assert (row, column) not in made
                    made[row, column] = part, tile
    return made


@settings(max_examples=60, deadline=None)
@given(cases())
def test_prerequisites_are_those_of_the_uncut_chain(placed: CutWorkload) -> None:
    """Element by element: whatever makes what the uncut tiles at the same place need, and nothing else."""
    for whole_edge in placed.whole.edges:
        producer, consumer = (placed.whole.stages[s].grid for s in (whole_edge.producer, whole_edge.consumer))
        made, reads = makers(placed, whole_edge.producer), makers(placed, whole_edge.consumer)
        assert len(made) == producer.m * producer.n and len(reads) == consumer.m * consumer.n
        wanted: dict[tuple[int, int], set[tuple[int, int]]] = {}
        for tile in range(consumer.tiles):
            needed = set()
            for p in whole_edge.dependencies.prerequisites_of(int(whole_edge.dependencies.group_of[tile])):
                top, bottom, left, right = producer.extent(p)
                needed |= {made[row, column] for row in range(top, bottom) for column in range(left, right)}
            top, bottom, left, right = consumer.extent(tile)
            for reader in {reads[row, column] for row in range(top, bottom) for column in range(left, right)}:
                wanted.setdefault(reader, set()).update(needed)
        found: dict[tuple[int, int], set[tuple[int, int]]] = {reader: set() for reader in wanted}
        for edge in placed.workload.edges:
            if placed.origin[edge.consumer][0] == whole_edge.consumer:
                assert placed.origin[edge.producer][0] == whole_edge.producer
                for tile, group in enumerate(edge.dependencies.group_of):
                    tiles = edge.dependencies.prerequisites_of(int(group))
                    found[edge.consumer, tile] |= {(edge.producer, p) for p in tiles}
        assert found == wanted


@given(cases())
def test_parts_add_up_to_the_chain(placed: CutWorkload) -> None:
    whole, parts = placed.whole, placed.workload
    assert parts.flops == whole.flops and parts.dtype == whole.dtype
    assert [s for s, _ in placed.origin] == sorted(s for s, _ in placed.origin)
    for stage in range(len(whole.stages)):
        widths = [placed.columns[part] for part in placed.parts_of(stage)]
        assert widths[0][0] == 0 and widths[-1][1] == whole.stages[stage].grid.n
        assert all(left[1] == right[0] for left, right in pairwise(widths))
    for edge in whole.edges:
        count = len(placed.parts_of(edge.producer)) * len(placed.parts_of(edge.consumer))
        grouped = [e for e in parts.edges if placed.origin[e.consumer][0] == edge.consumer]
        assert len(grouped) == count
        per_panel = edge.dependencies.num_groups == whole.stages[edge.consumer].grid.rows
        for e in grouped:
            grid = parts.stages[e.consumer].grid
            assert e.dependencies.num_groups == (grid.rows if per_panel else grid.tiles)


@given(cases())
def test_every_part_is_in_one_program_on_its_device(placed: CutWorkload) -> None:
    walked = [part for program in placed.programs for part in program]
    assert sorted(walked) == list(range(len(placed.origin)))
    devices = [{placed.placement.device_of(part) for part in program} for program in placed.programs]
    assert all(len(on) == 1 for on in devices)
    assert len(placed.programs) == len(placed.placement.devices), "cut stages follow each other on a device"
    assert all(list(program) == sorted(program) for program in placed.programs), "producers first"


@pytest.mark.parametrize("text", ["0,1,2", "0:66,1:66,0:66"])
def test_a_placement_that_cuts_nothing_changes_nothing(text: str) -> None:
    placement = Placement.parse(text)
    placed = cut(CHAIN, placement)
    assert placed.workload.stages == CHAIN.stages and placed.placement == placement
    assert [e.dependencies for e in placed.workload.edges] == [e.dependencies for e in CHAIN.edges]
    assert placed.origin == ((0, 0), (1, 0), (2, 0))
    assert placed.columns == ((0, 320), (0, 136), (0, 192))
    assert placed.programs == ((0,), (1,), (2,)), "uncut stages run at once, each in its own kernel"


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 8])
def test_a_chain_that_is_sharded(devices: int) -> None:
    """Parts side by side; 136 columns are uneven parts of 17 units on all but one device."""
    placed = cut(CHAIN, sharded(WIDTHS[1:], range(devices)))
    stages, parts = placed.workload.stages, range(devices)
    assert placed.origin == tuple((stage, part) for stage in range(3) for part in parts)
    assert placed.programs == tuple(tuple(stage * devices + part for stage in range(3)) for part in parts)
    assert len(placed.workload.edges) == 2 * devices**2
    assert all(s.activation == ("none" if i >= 2 * devices else "relu") and s.bias for i, s in enumerate(stages))
    assert [s.k for s in stages[::devices]] == WIDTHS[:-1], "a part reads all columns"
    if devices > 1:
        assert stages[1].name == "layer0[{}:{}]".format(*placed.columns[1])
    widths = [stages[part].grid.n for part in placed.parts_of(1)]
    assert sum(widths) == 136 and max(widths) - min(widths) == (8 if devices > 1 else 0)


def test_stages_cut_over_different_devices() -> None:
    """Stage 0 on two devices, stage 1 on two others, stage 2 whole on a fifth."""
    first = (Part(0, None, (0, 160)), Part(1, None, (160, 320)))
    second = (Part(2, None, (0, 64)), Part(3, None, (64, 136)))
    placed = cut(CHAIN, Placement((first, second, (Part(4),))))
    assert placed.programs == ((0,), (1,), (2,), (3,), (4,))
    assert placed.workload.stages[4] is CHAIN.stages[2]
    assert [(e.producer, e.consumer) for e in placed.workload.edges] == [(0, 2), (1, 2), (0, 3), (1, 3), (2, 4), (3, 4)]
    needs = [e.dependencies.need.tolist() for e in placed.workload.edges]
    # Panels of 160 columns are 3 tiles, of 64 one and of 72 two.
    assert needs == [[3] * 4, [3] * 4, [3] * 4, [3] * 4, [1] * 4, [2] * 4]


def test_one_part_of_all_columns_is_a_cut_stage_on_one_device() -> None:
    """It takes its turn on the device, where an uncut stage would want all of it."""
    placement = sharded([320, 136, 192], [3])
    placed = cut(CHAIN, placement)
    assert placed.workload.stages == CHAIN.stages and placed.programs == ((0, 1, 2),)
    assert placement.kind == "sharded"


def test_one_counter_per_tile_stays_one_counter_per_tile() -> None:
    per_tile = dense_chain(200, WIDTHS, tile=(64, 64), grouped=False)
    placed = cut(per_tile, sharded(WIDTHS[1:], [0, 1]))
    for edge in placed.workload.edges:
        assert edge.dependencies.num_groups == placed.workload.stages[edge.consumer].grid.tiles


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (((0, 160), (168, 320)), "leave a gap, overlap or are none; let each part begin where the one before it ends"),
        (((0, 160), (152, 320)), "leave a gap, overlap or are none"),
        (((8, 160), (160, 320)), "are not all of the stage's, 0 to 320; place every column"),
        (((0, 0), (0, 320)), "leave a gap, overlap or are none"),
        (((0, 160), (160, 100)), "leave a gap, overlap or are none"),
        (((0, 160), None), "its part on device 1 names no columns; give every part columns="),
        (((0, 164), (164, 320)), "a part begins at column 164; cut at multiples of 8"),
        (((0, 160), (160, 312)), "are not all of the stage's, 0 to 320; place every column"),
        (((0, 160), (160, 328)), "are not all of the stage's, 0 to 320; place every column"),
    ],
)
def test_columns_that_are_not_the_stages_are_refused(columns: tuple[tuple[int, int] | None, ...], message: str) -> None:
    with pytest.raises(PlacementError, match=f"stage 0.*{message}"):
        parts = tuple(Part(device, None, part) for device, part in enumerate(columns))
        cut(CHAIN, Placement((parts, (Part(2),), (Part(3),))))


def test_a_single_part_must_be_the_whole_stage() -> None:
    with pytest.raises(PlacementError, match=r"stage 1: the columns .* are not all of the stage's, 0 to 136"):
        cut(CHAIN, Placement(((Part(0),), (Part(1, None, (0, 128)),), (Part(2),))))


def test_a_placement_of_other_stages_is_refused() -> None:
    with pytest.raises(PlacementError, match="2 stages are placed, the workload has 3: place every stage"):
        cut(CHAIN, pipelined([0, 1]))


def test_only_chains_of_gemms_can_be_cut() -> None:
    grid = TileGrid(64, 64, 32, 32)
    stages = tuple(Stage(name, grid, 64) for name in "abc")
    edges = (Edge(0, 1, gemm_dependencies(grid, grid)), Edge(0, 2, gemm_dependencies(grid, grid)))
    placement = sharded([64, 64, 64], [0, 1])
    with pytest.raises(InvalidInput, match="only the stages of a chain can be cut by columns"):
        cut(Workload(stages, edges), placement)
    own = Workload(stages[:2], (Edge(0, 1, from_prerequisites(4, [[0], [1], [2], [3]])),))
    with pytest.raises(InvalidInput, match="edge 0 -> 1 has dependencies of its own; only a GEMM's"):
        cut(own, sharded([64, 64], [0, 1]))
    assert cut(own, pipelined([0, 1])).workload.edges[0].dependencies is own.edges[0].dependencies


def test_a_stage_with_an_order_of_its_own_cannot_be_cut() -> None:
    first = CHAIN.stages[0]
    ordered = replace(CHAIN, stages=(replace(first, order=grouped_order(first.grid, 2)), *CHAIN.stages[1:]))
    with pytest.raises(InvalidInput, match="stage layer0 is cut, so its tiles have no common order; leave order=None"):
        cut(ordered, sharded(WIDTHS[1:], [0, 1]))
    whole = cut(ordered, pipelined([0, 1, 2])).workload.stages[0]
    assert np.array_equal(whole.order, grouped_order(first.grid, 2))
