"""Chains cut by columns under the protocol: parts are stages, and those that one consumer reads count together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.protocol.graphs import EPOCHS, cuts
from tests.protocol.test_reference import check_events
from tilerelay.errors import InvalidInput, PipelineAborted
from tilerelay.graph.catalog import dense_chain
from tilerelay.graph.cut import CutWorkload, cut
from tilerelay.graph.dependency import from_prerequisites
from tilerelay.graph.placement import Part, Placement, pipelined, sharded
from tilerelay.graph.tiling import TileGrid
from tilerelay.graph.workload import Edge, Stage, Workload
from tilerelay.protocol.layout import ALIGNMENT, SEPARATE, STAGE_NUMBERS, ProtocolLayout, wrap32
from tilerelay.protocol.ledger import InvariantBroken
from tilerelay.protocol.reference import SCHEDULERS, Fault, run

WIDTHS = [64, 320, 136, 192]
CHAIN = dense_chain(200, WIDTHS, tile=(64, 64))
PER_TILE = dense_chain(200, WIDTHS, tile=(64, 64), grouped=False)
# Stage 0 on two devices, stage 1 on two others, stage 2 on one of each.
MIXED = Placement(
    (
        (Part(0, None, (0, 160)), Part(1, None, (160, 320))),
        (Part(2, None, (0, 64)), Part(3, None, (64, 136))),
        (Part(0, None, (0, 128)), Part(2, None, (128, 192))),
    )
)
PLACEMENTS = {
    **{f"{d} devices": sharded(WIDTHS[1:], range(d)) for d in (1, 2, 3, 4)},
    "mixed": MIXED,
    "a whole stage between": Placement((MIXED.stages[0], (Part(4),), MIXED.stages[2])),
}


def run_cut(placed: CutWorkload, signalling: str = "counter", **options: Any) -> None:
    workers = [1 + part % 3 for part in range(len(placed.origin))]
    events = run(placed.workload, placed.placement, signalling, workers, **options)
    check_events(placed.workload, events, options.get("epochs", 1), options.get("first_epoch", 1))


@pytest.mark.parametrize("first_epoch", EPOCHS)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("workload", [CHAIN, PER_TILE], ids=["grouped", "per tile"])
@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=list(PLACEMENTS))
def test_cut_chains_run_to_completion(
    placement: Placement, workload: Workload, scheduler: str, first_epoch: int
) -> None:
    for seed in range(2):
        run_cut(cut(workload, placement), seed=seed, scheduler=scheduler, epochs=3, first_epoch=first_epoch)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_cut_of_a_chain_runs_to_completion(data: st.DataObject) -> None:
    workload = dense_chain(
        data.draw(st.integers(1, 20)), [8, 48, 40], tile=(data.draw(st.sampled_from([4, 8])), 8),
        grouped=data.draw(st.booleans()),
    )  # fmt: skip
    run_cut(
        cut(workload, data.draw(cuts(workload))), seed=data.draw(st.integers(0, 2**32)), epochs=2,
        scheduler=data.draw(st.sampled_from(list(SCHEDULERS))), first_epoch=data.draw(st.sampled_from(EPOCHS)),
    )  # fmt: skip


def test_the_parts_of_a_stage_count_in_one_scoreboard_on_their_readers_device() -> None:
    placed = cut(CHAIN, MIXED)
    layout = ProtocolLayout(placed.workload, placed.placement, "counter")
    layout.check_kernels_can()
    for consumer in (2, 3, 4, 5):
        edges = layout.in_edges(consumer)
        before = consumer // 2 * 2  # two parts a stage
        assert [placed.workload.edges[e].producer for e in edges] == [before - 2, before - 1]
        boards = [layout.edge_field(e, "scoreboard") for e in edges]
        assert all(board is boards[0] for board in boards)
        assert boards[0].device == placed.placement.device_of(consumer)
        total = sum(placed.workload.edges[e].dependencies.need for e in edges)
        for e in edges:
            for name in ("need", "consumer_need"):
                assert np.array_equal(layout.edge_field(e, name).initial(1), total)
        counters = boards[0].initial(2**31)[::SEPARATE]
        assert np.array_equal(counters, wrap32((2**31 - 1) * total.astype(np.int64)))


def test_counters_that_several_devices_write_are_a_line_apart() -> None:
    """Rule 5; where one device alone writes, they are neighbours."""
    placed = cut(CHAIN, MIXED)
    layout = ProtocolLayout(placed.workload, placed.placement, "counter")
    assert layout.stride * 4 == SEPARATE * 4 == ALIGNMENT
    for edge in range(len(placed.workload.edges)):
        groups = placed.workload.edges[edge].dependencies.num_groups
        field = layout.edge_field(edge, "scoreboard")
        assert field.offset % ALIGNMENT == 0 and field.nbytes == groups * ALIGNMENT
    alone = ProtocolLayout(CHAIN, pipelined([0, 1, 2]), "counter")
    assert alone.stride == 1 and alone.edge_field(0, "scoreboard").nbytes == 4 * 4


def test_a_stages_numbers_are_what_its_kernel_needs() -> None:
    placed = cut(CHAIN, MIXED)
    layout = ProtocolLayout(placed.workload, placed.placement, "counter")
    for stage, part in enumerate(placed.workload.stages):
        numbers = dict(zip(STAGE_NUMBERS, layout.stage_numbers(stage), strict=True))
        assert numbers["stage"] == stage
        grid = part.grid
        assert [numbers[name] for name in ("tickets", "tiles_n", "n", "k")] == [grid.tiles, grid.cols, grid.n, part.k]
    queue = ProtocolLayout(PER_TILE, pipelined([0, 1, 2]), "queue")
    # Stage 1 has 4 x 3 tiles, each an entry; stage 2 has 4 x 3, too: rings of sixteen.
    assert queue.stage_numbers(1) == (1, 12, 3, 136, 320, 12, 15, 1, 1, 15, 1, 0)
    grouped = ProtocolLayout(CHAIN, pipelined([0, 1, 2]), "queue")
    assert grouped.stage_numbers(1) == (1, 12, 3, 136, 320, 4, 3, 3, 1, 3, 3, 0)
    assert grouped.stage_numbers(0)[5:] == (1, 0, 1, 1, 3, 3, 0)
    assert grouped.stage_numbers(2)[5:] == (4, 3, 3, 1, 0, 1, 0)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_queues_run_in_the_reference_however_stages_are_cut(scheduler: str) -> None:
    """It polls a ring for each part that a consumer reads; kernels do not."""
    for placement in (PLACEMENTS["2 devices"], MIXED):
        placed = cut(CHAIN, placement)
        run_cut(placed, "queue", scheduler=scheduler, epochs=3, first_epoch=2**32 - 2)
        with pytest.raises(InvalidInput, match=r"stage layer0\[0:160\] has several readers; use signalling='counter'"):
            ProtocolLayout(placed.workload, placed.placement, "queue").check_kernels_can()


def test_kernels_can_push_where_one_device_produces_for_one_reader() -> None:
    one = cut(CHAIN, PLACEMENTS["1 devices"])
    ProtocolLayout(one.workload, one.placement, "queue").check_kernels_can()
    run_cut(one, "queue", epochs=2)
    gathered = cut(CHAIN, PLACEMENTS["a whole stage between"])
    with pytest.raises(InvalidInput, match=r"stage layer1 reads from several stages; .* signalling='counter'"):
        ProtocolLayout(gathered.workload, gathered.placement, "queue").check_kernels_can()


def test_kernels_cannot_poll_two_scoreboards() -> None:
    """Two producers that feed different groups of a consumer's tiles."""
    stages = tuple(Stage(name, TileGrid(1, 2, 1, 1), 1) for name in "abc")
    apart, together = from_prerequisites(2, [[0], [1]]), from_prerequisites(2, [[0, 1], [0, 1]])
    workload = Workload(stages, (Edge(0, 2, apart), Edge(1, 2, together)))
    layout = ProtocolLayout(workload, pipelined([0, 1, 2]), "counter")
    assert layout.stride == 1 and layout.edge_field(0, "scoreboard") is not layout.edge_field(1, "scoreboard")
    with pytest.raises(InvalidInput, match=r"stage c reads from several stages; .* feed the same groups of tiles"):
        layout.check_kernels_can()
    run(layout.workload, layout.placement, "counter", [1, 1, 1], epochs=2)


@pytest.mark.parametrize("part", [0, 1])
def test_a_tile_that_one_part_loses_stops_every_reader(part: int) -> None:
    placed = cut(CHAIN, PLACEMENTS["2 devices"])
    with pytest.raises(PipelineAborted) as caught:
        run(placed.workload, placed.placement, "counter", [2] * 6, fault=Fault("lose_publish", part, ticket=4))
    name = placed.workload.stages[part].name
    for reader in ("layer1[0:64]", "layer1[64:136]"):
        assert any(w.startswith(reader) and f"tiles [4] of {name} (group 1)" in w for w in caught.value.waits)


def test_a_part_that_publishes_twice_cannot_stand_for_another() -> None:
    """The sum alone would be right; the ledger knows that a tile started without its prerequisites."""
    placed, found = cut(CHAIN, PLACEMENTS["2 devices"]), []
    for seed in range(20):
        with pytest.raises((InvariantBroken, PipelineAborted)) as caught:
            run(
                placed.workload, placed.placement, "counter", [2] * 6, seed=seed, scheduler="adversarial", epochs=2,
                fault=Fault("publish_twice", 0, ticket=0),
            )  # fmt: skip
        found.append(str(caught.value))
    assert any("starts before tile" in outcome for outcome in found)
    assert any("above epoch * need" in outcome for outcome in found)
