"""Which stages send their tiles in turn, and which sums begin before all of their inputs are there."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilerelay.graph.catalog import dense_chain
from tilerelay.graph.cut import cut
from tilerelay.graph.dependency import from_prerequisites
from tilerelay.graph.placement import Part, Placement, pipelined, sharded
from tilerelay.graph.turns import FIRST_STEP, MOST_WAVES, UNDER_WAY, steps_of, with_turns
from tilerelay.graph.workload import Edge, Workload, with_walk
from tilerelay.kernels.config import BLOCK_K

SMS = 132
WIDTHS = [8192, 8192, 8192]
TWO = sharded(WIDTHS[1:], [0, 1])


def turns(workload: Workload, placement: Placement, can: bool = True, walks: bool = False) -> list[int | None]:
    """`under_way` of every part; and steps are where, and only where, a part that takes turns is read."""
    placed = cut(workload, placement)
    if walks:
        stages = tuple(with_walk(stage, SMS, unit=64) for stage in placed.workload.stages)
        placed = replace(placed, workload=replace(placed.workload, stages=stages))
    found = with_turns(placed, [SMS] * len(placed.origin), [can] * len(placed.origin))
    read = {edge.consumer for edge in found.edges if found.stages[edge.producer].under_way}
    for edge in found.edges:
        k = found.stages[edge.consumer].k
        assert edge.dependencies.steps == (steps_of(k) if edge.consumer in read else ())
    return [stage.under_way for stage in found.stages]


@given(st.integers(1, 2**31 - 1))
def test_each_step_takes_a_sum_to_twice_what_came_before(k: int) -> None:
    steps = steps_of(k)
    assert steps == () if k <= FIRST_STEP else (steps[0], steps[-1]) == (FIRST_STEP, k)
    assert all(before < after <= 2 * before for before, after in pairwise(steps))
    assert len(steps) <= 32, "a lane for each"
    assert all(step % BLOCK_K == 0 for step in steps[:-1]), "no block of the sum lies in two"


@pytest.mark.parametrize("m", [1, 512, 1024])
def test_a_single_wave_of_a_cut_stage_is_sent_in_turn(m: int) -> None:
    assert turns(dense_chain(m, WIDTHS), TWO) == [UNDER_WAY, UNDER_WAY, None, None]


def test_more_waves_of_a_cut_stage_are_not() -> None:
    assert turns(dense_chain(1152, WIDTHS), TWO) == [None] * 4


def test_a_stage_that_is_read_while_it_is_made_is_sent_in_turn_for_a_few_waves() -> None:
    rows = MOST_WAVES * SMS // 32 * 128
    assert turns(dense_chain(rows, WIDTHS), pipelined([0, 1])) == [UNDER_WAY, None]
    assert turns(dense_chain(rows + 1, WIDTHS), pipelined([0, 1])) == [None, None]
    groups = Placement((TWO.stages[0], (Part(2, None, (0, 4096)), Part(3, None, (4096, 8192)))))
    assert turns(dense_chain(2048, WIDTHS), groups) == [UNDER_WAY, UNDER_WAY, None, None]


def test_nothing_is_sent_where_nobody_else_reads() -> None:
    one = sharded(WIDTHS[1:], [0])
    assert turns(dense_chain(512, WIDTHS), one) == [None, None]
    shares = Placement.parse("0:66,0:66,1:66")
    assert turns(dense_chain(512, [*WIDTHS, 8192]), shares) == [None, UNDER_WAY, None]


def test_short_sums_have_no_steps_and_what_they_read_no_turns() -> None:
    assert turns(dense_chain(512, [8192, FIRST_STEP, 8192]), sharded([FIRST_STEP, 8192], [0, 1])) == [None] * 4


def test_each_part_is_looked_at_alone() -> None:
    """The reader's own part stays; the reader takes steps for both."""
    uneven = Placement(((Part(0, None, (0, 1000)), Part(1, None, (1000, 8192))), (Part(0, None, (0, 8192)),)))
    assert turns(dense_chain(512, WIDTHS), uneven) == [None, UNDER_WAY, None]


def test_kernels_that_know_no_turns_take_none() -> None:
    assert turns(dense_chain(512, WIDTHS), TWO, can=False) == [None] * 4


def test_walks_take_no_turns() -> None:
    """Their CTAs end together, in no order of columns; as readers they may take steps."""
    assert turns(dense_chain(512, [8192, 57344, 8192, 8192]), sharded([57344, 8192, 8192], [0, 1]), walks=True) == [
        None, None, UNDER_WAY, UNDER_WAY, None, None,
    ]  # fmt: skip
    assert turns(dense_chain(512, [8192, 8192, 28672]), sharded([8192, 28672], [0, 1]), walks=True)[0] == UNDER_WAY


@pytest.mark.parametrize("dependencies", ["per tile", "their own"])
def test_other_dependencies_than_whole_panels_have_no_steps(dependencies: str) -> None:
    workload = dense_chain(512, WIDTHS, grouped=dependencies != "per tile")
    if dependencies == "their own":
        own = from_prerequisites(128, [[tile] for tile in range(128)])
        workload = replace(workload, edges=(Edge(0, 1, own),))
    assert turns(workload, pipelined([0, 1])) == [None, None]
