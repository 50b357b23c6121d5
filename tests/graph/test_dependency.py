"""Tile dependencies against a brute-force map from the elements that tiles make and read."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilerelay.errors import InvalidInput
from tilerelay.graph.dependency import TileDependencies, from_prerequisites, gemm_dependencies
from tilerelay.graph.tiling import TileGrid

sizes = st.integers(1, 24)


@st.composite
def grid_pairs(draw: st.DrawFn) -> tuple[TileGrid, TileGrid]:
    """Two outputs with the same rows, cut differently."""
    m = draw(sizes)
    return TileGrid(m, draw(sizes), draw(sizes), draw(sizes)), TileGrid(m, draw(sizes), draw(sizes), draw(sizes))


@st.composite
def maps(draw: st.DrawFn) -> tuple[int, list[set[int]]]:
    """(number of producer tiles, prerequisites of every consumer tile); few distinct sets, so that groups arise."""
    producers = draw(st.integers(1, 8))
    kinds = draw(st.lists(st.sets(st.integers(0, producers - 1), min_size=1), min_size=1, max_size=4))
    return producers, draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=12))


def overlap(producer: TileGrid, consumer: TileGrid) -> list[set[int]]:
    """A GEMM's tile reads all columns of its own rows: mark every element with its maker, and look."""
    maker = np.empty((producer.m, producer.n), dtype=int)
    for tile in range(producer.tiles):
        top, bottom, left, right = producer.extent(tile)
        maker[top:bottom, left:right] = tile
    extents = [consumer.extent(tile) for tile in range(consumer.tiles)]
    return [set(maker[top:bottom].flat) for top, bottom, _, _ in extents]


def as_map(dependencies: TileDependencies) -> list[set[int]]:
    """Prerequisites of every consumer tile, read from the CSR arrays alone."""
    found: list[set[int]] = [set() for _ in range(dependencies.num_consumers)]
    for producer in range(dependencies.num_producers):
        for group in dependencies.groups_of_producer(producer):
            for tile in dependencies.members_of(group):
                assert producer not in found[tile], "an edge twice would count twice"
                found[tile].add(producer)
    return found


def check_consistent(dependencies: TileDependencies, wanted: list[set[int]]) -> None:
    """All views of the dependencies say the same as the map."""
    assert as_map(dependencies) == wanted
    assert sorted(dependencies.members) == list(range(len(wanted)))
    for tile, prerequisites in enumerate(wanted):
        group = int(dependencies.group_of[tile])
        assert tile in dependencies.members_of(group)
        assert set(dependencies.prerequisites_of(group)) == prerequisites
        assert dependencies.need[group] == len(prerequisites)
    arrays = (
        dependencies.offsets,
        dependencies.counters,
        dependencies.need,
        dependencies.members,
        dependencies.group_of,
    )
    assert all(array.dtype == np.int32 for array in arrays)


@given(grid_pairs())
def test_the_closed_form_is_the_overlap_of_elements(pair: tuple[TileGrid, TileGrid]) -> None:
    wanted = overlap(*pair)
    grouped = gemm_dependencies(*pair)
    check_consistent(grouped, wanted)
    assert grouped.num_groups == pair[1].rows
    assert grouped.uniform_group_size == pair[1].cols
    per_tile = gemm_dependencies(*pair, grouped=False)
    check_consistent(per_tile, wanted)
    assert per_tile.num_groups == per_tile.num_consumers and per_tile.uniform_group_size == 1


@given(grid_pairs())
def test_the_closed_form_is_the_general_path(pair: tuple[TileGrid, TileGrid]) -> None:
    closed, general = (
        gemm_dependencies(*pair, grouped=False),
        from_prerequisites(pair[0].tiles, overlap(*pair), grouped=False),
    )
    for name in ("offsets", "counters", "need", "member_offsets", "members"):
        assert np.array_equal(getattr(closed, name), getattr(general, name)), name
    assert closed.same_as(general)
    other = gemm_dependencies(pair[0], pair[1])
    assert closed.same_as(other) == (pair[1].cols == 1)


@given(maps(), st.booleans())
def test_any_map_comes_back(case: tuple[int, list[set[int]]], grouped: bool) -> None:
    producers, wanted = case
    dependencies = from_prerequisites(producers, wanted, grouped=grouped)
    check_consistent(dependencies, wanted)
    distinct = len({frozenset(tiles) for tiles in wanted})
    assert dependencies.num_producers == producers
    assert dependencies.num_groups == (distinct if grouped else len(wanted))


@given(maps())
def test_one_counter_per_tile_is_the_same_map(case: tuple[int, list[set[int]]]) -> None:
    producers, wanted = case
    per_tile = from_prerequisites(producers, wanted).per_tile()
    check_consistent(per_tile, wanted)
    assert per_tile.num_groups == len(wanted) and per_tile.uniform_group_size == 1


def test_prerequisites_may_repeat_and_come_in_any_order() -> None:
    check_consistent(from_prerequisites(3, [[2, 0, 2], [0, 2]]), [{0, 2}, {0, 2}])


@pytest.mark.parametrize(
    ("prerequisites", "size"),
    [
        ([[0], [0], [1], [1]], 2),
        ([[0], [1], [0], [1]], None),  # groups that are not neighbours
        ([[0], [0], [0], [1]], None),  # groups of different sizes
        ([[0], [0], [0], [0]], 4),
        ([[0], [1], [2], [0, 1]], 1),
        ([[0], [0], [1]], None),  # 3 tiles in 2 groups
    ],
)
def test_a_queue_entry_names_a_group_only_when_groups_are_equal_runs_of_tiles(
    prerequisites: list[list[int]], size: int | None
) -> None:
    assert from_prerequisites(3, prerequisites).uniform_group_size == size


def test_a_consumer_tile_without_prerequisites_is_refused() -> None:
    with pytest.raises(
        InvalidInput, match="consumer tile 1 has no prerequisites; every tile must depend on at least one"
    ):
        from_prerequisites(2, [[0], []])


@pytest.mark.parametrize("tile", [-1, 2])
def test_a_prerequisite_that_does_not_exist_is_refused(tile: int) -> None:
    with pytest.raises(InvalidInput, match=r"consumer tile 0: name producer tiles in 0\.\.1, not"):
        from_prerequisites(2, [[tile], [0]])


def test_no_consumer_tiles_are_refused() -> None:
    with pytest.raises(InvalidInput, match="give the prerequisites of at least one"):
        from_prerequisites(2, [])


def test_different_numbers_of_rows_are_refused() -> None:
    with pytest.raises(InvalidInput, match="makes 8 rows, the consumer reads 9: give both the same m"):
        gemm_dependencies(TileGrid(8, 8, 4, 4), TileGrid(9, 8, 4, 4))


# Steps


@st.composite
def stepped(draw: st.DrawFn) -> tuple[TileGrid, TileGrid, tuple[int, ...], int]:
    """(producer, consumer, steps, first column): a part of the columns that the consumer's sum takes in steps."""
    producer, consumer = draw(grid_pairs())
    first_column = draw(st.integers(0, 20))
    k = first_column + producer.n + draw(st.integers(0, 20))
    inner = draw(st.sets(st.integers(1, k), max_size=4)) - {k}
    return producer, consumer, (*sorted(inner), k), first_column


@given(stepped())
def test_steps_wait_for_the_tiles_whose_elements_they_read(
    case: tuple[TileGrid, TileGrid, tuple[int, ...], int],
) -> None:
    producer, consumer, steps, first_column = case
    dependencies = gemm_dependencies(producer, consumer, steps=steps, first_column=first_column)
    maker = np.full((producer.m, steps[-1]), -1)
    for tile in range(producer.tiles):
        top, bottom, left, right = producer.extent(tile)
        maker[top:bottom, first_column + left : first_column + right] = tile
    assert (dependencies.num_groups, dependencies.num_steps) == (consumer.rows, len(steps))
    for tile in range(consumer.tiles):
        top, bottom, _, _ = consumer.extent(tile)
        group = int(dependencies.group_of[tile])
        for step, (begin, end) in enumerate(zip((0, *steps), steps, strict=False)):
            wanted = set(maker[top:bottom, begin:end].flat) - {-1}
            counter = group * len(steps) + step
            assert set(dependencies.counted_by(counter)) == wanted
            assert dependencies.need[counter] == len(wanted)
        assert dependencies.prerequisites_of(group) == sorted(set(maker[top:bottom].flat) - {-1})
    assert dependencies.counters.dtype == dependencies.need.dtype == np.int32


@given(grid_pairs())
def test_one_step_is_all_at_once(pair: tuple[TileGrid, TileGrid]) -> None:
    whole, one = gemm_dependencies(*pair), gemm_dependencies(*pair, steps=(pair[0].n,))
    assert replace(one, steps=()).same_as(whole) and not one.same_as(whole)


def test_steps_per_tile_are_refused() -> None:
    grid = TileGrid(8, 8, 4, 4)
    with pytest.raises(InvalidInput, match="share the counters of their group"):
        gemm_dependencies(grid, grid, steps=(4, 8)).per_tile()
