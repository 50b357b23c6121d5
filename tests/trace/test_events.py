"""The event table: its names and the kernels', what it refuses, and what it derives from dependencies and workers."""

from __future__ import annotations

import numpy as np
import pytest

from tests.trace.made import WORKERS, pipeline, random_trace, table
from tilerelay.errors import InvalidInput
from tilerelay.graph.catalog import dense_chain
from tilerelay.graph.cut import cut
from tilerelay.graph.dependency import from_prerequisites
from tilerelay.graph.placement import sharded
from tilerelay.graph.tiling import TileGrid
from tilerelay.graph.turns import with_turns
from tilerelay.graph.workload import Edge, Stage, Workload
from tilerelay.kernels import protocol
from tilerelay.trace import events
from tilerelay.trace.events import EVENTS, KEYS, PHASES, PUBLISHED, ROLES, STAGE, TILE, edge_info, first_workers
from tilerelay.trace.files import from_values, to_values

ONE = dense_chain(64, [64, 64], tile=(64, 64))
GOOD = ((0, 0, 0, 0), (0, 1, 2, 3, 4, 5))


def test_the_kernels_number_their_events_as_the_table_does() -> None:
    numbers = {name: getattr(protocol, name.upper()).value for name in EVENTS}
    assert numbers == {name: getattr(events, name.upper()) for name in EVENTS} == {n: i for i, n in enumerate(EVENTS)}
    assert protocol.EVENTS.value == len(EVENTS)


def test_every_event_but_the_first_ends_one_phase_of_one_role() -> None:
    assert list(PHASES.values()) == list(range(1, len(EVENTS)))
    assert ROLES.keys() == PHASES.keys()


@pytest.mark.parametrize(
    ("records", "what"),
    [
        ([], "at least one"),
        ([((1, 0, 0, 0), GOOD[1])], "do not exist"),
        ([((0, 0, -1, 0), GOOD[1])], "do not exist"),
        ([((0, 1, 0, 0), GOOD[1])], "not in their stage's grid"),
        ([GOOD, GOOD], "twice"),
        ([(GOOD[0], (0, -1, 2, 3, 4, 5))], "obtained, computed, stored"),
        ([(GOOD[0], (0, 1, 2, -1, 4, 5))], "obtained, computed, stored"),
    ],
)
def test_a_table_that_makes_no_sense_is_refused(
    records: list[tuple[tuple[int, ...], tuple[int, ...]]], what: str
) -> None:
    with pytest.raises(InvalidInput, match=what):
        table(ONE, records)


def test_events_that_were_not_recorded_take_no_time() -> None:
    trace = table(ONE, [(GOOD[0], (-1, 10, -1, 30, 40, -1))])
    assert trace.at.tolist() == [[10, 10, 10, 30, 40, 40]]
    assert (trace.begin, trace.end, trace.backward) == (10, 40, 0)


def test_events_that_go_backwards_are_counted() -> None:
    trace = table(ONE, [(GOOD[0], (5, 9, 7, 30, 40, 50))])
    assert trace.backward == 1
    assert trace.at.tolist() == [[5, 9, 9, 30, 40, 50]]
    assert pipeline().backward == 0


@pytest.mark.parametrize("seed", range(30))
def test_edges_name_the_same_prerequisites_as_the_workload(seed: int) -> None:
    rng = np.random.default_rng(seed)
    producers, consumers = (int(n) for n in rng.integers(1, 9, 2))
    needs = [rng.choice(producers, int(rng.integers(1, producers + 1)), replace=False) for _ in range(consumers)]
    needs[-1] = needs[0]  # two tiles with the same prerequisites
    for grouped in (True, False):
        info = edge_info(Edge(0, 1, from_prerequisites(producers, [n.tolist() for n in needs], grouped=grouped)))
        found = {tile: sorted(tiles.tolist()) for tiles, members in info.groups for tile in members.tolist()}
        assert found == {tile: sorted(n.tolist()) for tile, n in enumerate(needs)}
        assert len(info.groups) == len({tuple(sorted(n.tolist())) for n in needs})


def test_a_sum_in_steps_begins_with_the_tiles_of_its_first_step() -> None:
    """Two parts of 640 columns in tiles of 128; the first of three steps is 256 columns, two tiles of part 0."""
    placed = cut(dense_chain(200, [64, 640, 136], tile=(128, 128)), sharded([640, 136], [0, 1]))
    workload = with_turns(placed, [132] * 4, [True] * 4)
    needed = {edge.producer: edge_info(edge) for edge in workload.edges if edge.consumer == 2}
    assert [tiles.tolist() for tiles, _ in needed[0].groups] == [[0, 1, 2], [3, 4, 5]]
    assert [tiles.tolist() for tiles in needed[0].first] == [[0, 1], [3, 4]]
    assert [tiles.tolist() for tiles in needed[1].first] == [[], []]


@pytest.mark.parametrize(
    ("under_way", "device", "expected"),
    [(16, 0, (1, 35)), (16, 1, (0, 90)), (None, 0, (0, 90))],
    ids=["told early", "elsewhere", "not in turn"],
)
def test_a_tile_sent_in_turn_came_to_its_own_device_when_it_was_computed(
    under_way: int | None, device: int, expected: tuple[int, int]
) -> None:
    """Tile 0, published everywhere at 90, and one from device 2, published at 35; the reader is on device 0."""
    need, grid = from_prerequisites(1, [[0]]), TileGrid(1, 1, 1, 1)
    stages = (Stage("a", grid, 1, under_way=under_way), Stage("b", grid, 1), Stage("c", grid, 1))
    workload = Workload(stages, (Edge(0, 2, need), Edge(1, 2, need)))
    early, late, reader = (0, 10, 11, 20, 30, 90), (0, 10, 11, 20, 30, 35), (40, 41, 42, 95, 96, 97)
    trace = table(workload, [((0, 0, device, 0), early), ((1, 0, 2, 0), late), ((2, 0, 0, 1), reader)])
    assert (trace.last_prerequisite[2], trace.arrival[2]) == expected


def test_a_table_without_first_tiles_is_one_without_steps() -> None:
    values = to_values(pipeline())
    del values["edges"][0]["first"]
    (edge,) = from_values(values).edges
    assert [tiles.tolist() for tiles in edge.first] == [tiles.tolist() for tiles, _ in edge.groups]


@pytest.mark.parametrize("seed", range(30))
def test_last_prerequisite_and_previous_tile_agree_with_a_search(seed: int) -> None:
    trace = random_trace(np.random.default_rng(seed))
    key = trace.keys.tolist()
    for record, (stage, tile, device, worker) in enumerate(key):
        needed = {
            (edge.producer, t)
            for edge in trace.edges if edge.consumer == stage
            for tiles, members in edge.groups if tile in members
            for t in tiles.tolist()
        }  # fmt: skip
        times = [int(trace.at[r, PUBLISHED]) for r in range(len(trace)) if (key[r][STAGE], key[r][TILE]) in needed]
        found = int(trace.last_prerequisite[record])
        assert (found < 0) == (not times)
        if times:
            assert (key[found][STAGE], key[found][TILE]) in needed and trace.at[found, PUBLISHED] == max(times)
        walk = trace.walks[device, worker]
        at = walk.index(record)
        assert trace.previous[record] == (walk[at - 1] if at else -1)
    assert sorted(r for walk in trace.walks.values() for r in walk) == list(range(len(trace)))


def test_a_slice_keeps_rows_and_starts_anew() -> None:
    trace = pipeline()
    part = trace.rows(2, 4)
    assert len(part) == 2 * 2 * 2 and part.begin == 0 and part.run["rows"] == [2, 4]
    kept = {tuple(k[:2]): t for k, t in zip(part.keys.tolist(), part.times.tolist(), strict=True)}
    whole = {tuple(k[:2]): t for k, t in zip(trace.keys.tolist(), trace.times.tolist(), strict=True)}
    assert kept.keys() == {(stage, tile) for stage in (0, 1) for tile in range(4, 8)}
    (shift,) = {whole[key][i] - kept[key][i] for key in kept for i in range(len(EVENTS))}
    assert shift > 0
    with pytest.raises(InvalidInput, match="at least one"):
        trace.rows(6, 9)


def test_workers_of_stages_on_one_device_have_different_numbers() -> None:
    assert first_workers([0, 0, 1, 0], [3, 4, 5, 6]) == [0, 3, 0, 7]
    assert len(pipeline().walks) == 2 * WORKERS
    assert len(KEYS) == pipeline().keys.shape[1]
