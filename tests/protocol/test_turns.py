"""Tiles that are sent in turn and sums that begin before their inputs are all there, under the protocol."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.protocol.graphs import EPOCHS, cuts
from tests.protocol.test_reference import check_events
from tilerelay.errors import InvalidInput, PipelineAborted
from tilerelay.graph import turns
from tilerelay.graph.catalog import dense_chain
from tilerelay.graph.cut import cut
from tilerelay.graph.placement import Part, Placement, pipelined, sharded
from tilerelay.graph.turns import with_turns
from tilerelay.graph.walk import even_walk
from tilerelay.graph.workload import Workload
from tilerelay.protocol.layout import STAGE_NUMBERS, ProtocolLayout
from tilerelay.protocol.ledger import InvariantBroken
from tilerelay.protocol.reference import SCHEDULERS, Fault, run

WIDTHS = [64, 1000, 640, 72]
CHAIN = dense_chain(200, WIDTHS, tile=(64, 64))
UNEVEN = Placement(
    (
        (Part(0, None, (0, 104)), Part(1, None, (104, 1000))),
        (Part(2, None, (0, 632)), Part(0, None, (632, 640))),
        (Part(1, None, (0, 72)),),
    )
)
PLACEMENTS = {"2 devices": sharded(WIDTHS[1:], [0, 1]), "3 devices": sharded(WIDTHS[1:], [0, 1, 2]), "uneven": UNEVEN}
PLACEMENTS["pipelined"] = pipelined([0, 1, 2])


def in_turn(workload: Workload, placement: Placement, under_way: int = 3) -> tuple[Workload, Placement]:
    """In parts, with turns: of a few tiles, where there may be any."""
    placed = cut(workload, placement)
    count = len(placed.origin)
    found = with_turns(placed, [132] * count, [True] * count)
    stages = tuple(replace(s, under_way=under_way if s.under_way else None) for s in found.stages)
    assert any(s.under_way for s in stages)
    return replace(found, stages=stages), placed.placement


def run_in_turn(workload: Workload, placement: Placement, **options: Any) -> None:
    workers = [1 + part % 3 for part in range(len(workload.stages))]
    events = run(workload, placement, "counter", workers, **options)
    check_events(workload, events, options.get("epochs", 1), options.get("first_epoch", 1))


@pytest.mark.parametrize("first_epoch", EPOCHS)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=list(PLACEMENTS))
def test_chains_run_to_completion(placement: Placement, scheduler: str, first_epoch: int) -> None:
    for seed in range(2):
        run_in_turn(*in_turn(CHAIN, placement), seed=seed, scheduler=scheduler, epochs=3, first_epoch=first_epoch)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_cut_of_a_chain_runs_to_completion(data: st.DataObject) -> None:
    """Steps of a few columns: parts that lack some of them, tiles that lie in several."""
    workload = dense_chain(data.draw(st.integers(1, 20)), [8, 48, 40], tile=(data.draw(st.sampled_from([4, 8])), 8))
    placed = cut(workload, data.draw(cuts(workload)))
    first_step = data.draw(st.integers(1, 24))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(turns, "FIRST_STEP", first_step)
        patch.setattr(turns, "UNDER_WAY", data.draw(st.integers(1, 5)))
        found = with_turns(placed, [132] * len(placed.origin), [True] * len(placed.origin))
    run_in_turn(
        found, placed.placement, seed=data.draw(st.integers(0, 2**32)), epochs=2,
        scheduler=data.draw(st.sampled_from(list(SCHEDULERS))), first_epoch=data.draw(st.sampled_from(EPOCHS)),
    )  # fmt: skip


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_sums_that_are_shared_take_steps(scheduler: str) -> None:
    """Each piece takes the steps up to its end."""
    wide, placement = in_turn(dense_chain(64, [64, 640, 384], tile=(64, 64)), sharded([640, 384], [0, 1]))
    stages = list(wide.stages)
    for part in (2, 3):
        tiles = np.arange(stages[part].grid.tiles, dtype=np.int32)
        walk = even_walk(tiles, 640, 2, together=1, unit=64)
        assert walk is not None and walk.places
        stages[part] = replace(stages[part], walk=walk)
    shared = replace(wide, stages=tuple(stages))
    for seed in range(10):
        events = run(shared, placement, "counter", [2, 3, 2, 2], seed=seed, scheduler=scheduler, epochs=3)
        check_events(shared, events, 3, 1)


def test_a_tile_waits_for_the_one_so_many_turns_before_it() -> None:
    workload, placement = in_turn(CHAIN, sharded(WIDTHS[1:], [0, 1]), under_way=2)
    layout = ProtocolLayout(workload, placement, "counter")
    for part, stage in enumerate(workload.stages):
        numbers = dict(zip(STAGE_NUMBERS, layout.stage_numbers(part), strict=True))
        into = [edge for edge in workload.edges if edge.consumer == part]
        assert numbers["under_way"] == (2 if stage.under_way else 0)
        assert numbers["in_steps"] == (into[0].dependencies.num_steps if into else 1)
    with pytest.raises(PipelineAborted) as caught:
        run(workload, placement, "counter", [8] * 6, fault=Fault("lose_turn", 0, ticket=3))
    order = layout.stage_field(0, "order").initial(1)  # type: ignore[misc]
    late, earlier = int(order[5]), int(order[3])
    name = workload.stages[0].name
    assert any(w == f"{name}, tile {late} waits for its turn after tile {earlier}" for w in caught.value.waits)


def broken_by(fault: Fault, under_way: int, workers: int) -> list[str]:
    """What the ledger says in twenty runs with a mistake."""
    workload, placement = in_turn(CHAIN, sharded(WIDTHS[1:], [0, 1]), under_way)
    found = []
    for seed in range(20):
        try:
            run(workload, placement, "counter", [workers] * 6, seed=seed, scheduler="adversarial", fault=fault)
        except InvariantBroken as broken:
            found.append(str(broken))
    return found


def test_a_step_that_is_not_waited_for_is_caught() -> None:
    found = broken_by(Fault("skip_step_wait", 2, ticket=0), under_way=3, workers=2)
    assert any("tile 0 of layer1[0:320] starts before tile" in message for message in found)


def test_a_tile_that_is_announced_elsewhere_before_it_is_sent_is_caught() -> None:
    found = broken_by(Fault("announce_unsent", 0, ticket=15), under_way=1, workers=8)
    assert any("layer1[320:640] starts before tile" in message for message in found)
    assert not any("layer1[0:320] starts before tile" in message for message in found), "that one is on its device"


def test_a_lost_tile_is_named_with_its_step() -> None:
    """The last tile of part 0's panel 1 has columns 448 to 499: the second step of four."""
    workload, placement = in_turn(CHAIN, sharded(WIDTHS[1:], [0, 1]))
    with pytest.raises(PipelineAborted) as caught:
        run(workload, placement, "counter", [2] * 6, fault=Fault("lose_publish", 0, ticket=15))
    name = workload.stages[0].name
    assert any(f"tiles [15] of {name} (group 1, step 1)" in w for w in caught.value.waits)


def test_queues_know_neither_turns_nor_steps() -> None:
    workload, placement = in_turn(CHAIN, pipelined([0, 1, 2]))
    with pytest.raises(InvalidInput, match="sends its tiles in turn, but queues know no turns: use counters"):
        ProtocolLayout(workload, placement, "queue")
    unturned = replace(workload, stages=tuple(replace(stage, under_way=None) for stage in workload.stages))
    with pytest.raises(InvalidInput, match="reads its inputs in steps, but queues know whole groups: use counters"):
        ProtocolLayout(unturned, placement, "queue")
