"""Sums that two CTAs share, under the reference executor: they meet under every schedule, and mistakes are caught."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.protocol.graphs import EPOCHS
from tests.protocol.test_reference import check_events
from tilerelay.errors import InvalidInput, PipelineAborted
from tilerelay.graph.catalog import dense_chain
from tilerelay.graph.placement import pipelined
from tilerelay.graph.walk import Walk, even_walk
from tilerelay.graph.workload import Workload
from tilerelay.protocol.layout import WARPGROUPS, ProtocolLayout, wrap32
from tilerelay.protocol.ledger import InvariantBroken, Ledger
from tilerelay.protocol.reference import SCHEDULERS, Fault, run

UNIT = 16
CHAIN = dense_chain(500, [64, 640, 768, 384], tile=(128, 128))  # 4 x 5, 4 x 6 and 4 x 3 tiles
CTAS = [12, 16, 8]


def with_walks(workload: Workload, ctas: list[int], together: int = 4) -> Workload:
    stages = []
    for stage, count in zip(workload.stages, ctas, strict=True):
        grid = stage.grid
        order = np.arange(grid.tiles, dtype=np.int32).reshape(grid.rows, grid.cols).T.reshape(-1)
        walk = even_walk(order, stage.k, count, together=together, unit=UNIT)
        assert walk is not None
        stages.append(replace(stage, order=order, walk=walk))
    return replace(workload, stages=tuple(stages))


WALKS = with_walks(CHAIN, CTAS)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32), st.sampled_from(list(SCHEDULERS)), st.sampled_from(EPOCHS),
    st.sampled_from([(CTAS, 4), ([6, 7, 5], 1), ([9, 10, 9], 2)]),
)  # fmt: skip
def test_a_chain_runs_to_completion(seed: int, scheduler: str, epoch: int, split: tuple[list[int], int]) -> None:
    """Several runs on the same memory, whoever runs ahead."""
    workload = with_walks(CHAIN, *split)
    ctas = [stage.walk.ctas for stage in workload.stages if stage.walk]
    events = run(
        workload, pipelined([0, 1, 2]), "counter", ctas, seed=seed, scheduler=scheduler, epochs=3, first_epoch=epoch
    )
    check_events(workload, events, 3, epoch)


def second_piece(stage: int) -> int:
    """A ticket that continues a sum."""
    walk = WALKS.stages[stage].walk
    assert walk is not None
    return int(np.flatnonzero(walk.pieces[:, 0] > 0)[0])


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_sum_that_is_not_waited_for_is_noticed(stage: int) -> None:
    fault = Fault("skip_sum_wait", stage, second_piece(stage))
    with pytest.raises(InvariantBroken, match="continues a sum before it is begun"):
        for seed in range(30):
            run(WALKS, pipelined([0, 1, 2]), "counter", CTAS, seed=seed, scheduler="adversarial", fault=fault)


def test_second_pieces_first_is_a_deadlock_that_names_the_tiles() -> None:
    """The order of a walk's turns is what keeps CTAs from waiting for each other in a ring."""
    pieces = np.array([[0, 32, 0], [0, 32, 1], [32, 64, 1], [32, 64, 0]], dtype=np.int32)
    tiles = np.array([0, 1, 1, 0], dtype=np.int32)
    stage = dense_chain(128, [64, 256], tile=(128, 128)).stages[0]

    def turns(order: list[int]) -> Workload:
        return Workload((replace(stage, walk=Walk(2, tiles[order], pieces[order], 2)),), ())

    assert run(turns([0, 1, 2, 3]), pipelined([0]), "counter", [2])
    with pytest.raises(PipelineAborted, match="tile 1 waits for the first piece of its sum"):
        run(turns([2, 3, 0, 1]), pipelined([0]), "counter", [2])


def test_a_place_is_not_used_twice_in_a_run() -> None:
    ledger = Ledger(Workload((WALKS.stages[0],), ()), lambda _: 0)
    ledger.begin_sum(0, 3, 0, run=0)
    with pytest.raises(InvariantBroken, match="begins its sum where that of tile 3 lies"):
        ledger.begin_sum(0, 4, 0, run=0)
    ledger.begin_sum(0, 4, 0, run=1)
    with pytest.raises(InvariantBroken, match="continues a sum before it is begun"):
        ledger.take_sum(0, 3, 0, run=1)


def test_memory_of_a_walk() -> None:
    layout = ProtocolLayout(WALKS, pipelined([0, 1, 2]), "counter")
    for index, stage in enumerate(WALKS.stages):
        walk = stage.walk
        assert walk is not None and layout.tickets(index) == walk.tickets
        for epoch in EPOCHS:
            image = layout.image(index, epoch)
            for name, expected in {
                "order": walk.tiles,
                "pieces": walk.pieces.reshape(-1),
                "given": np.full(walk.places * WARPGROUPS, wrap32(epoch - 1)),
            }.items():
                field = layout.stage_field(index, name)
                found = image[field.offset : field.offset + field.nbytes].view(field.dtype)
                assert field.device == index and np.array_equal(found, expected), name
        sums = layout.stage_field(index, "sums")
        assert sums.nbytes == walk.places * 128 * 128 * 4
        assert len(layout.image(index)) <= sums.offset == layout.size(index) - sums.nbytes, "need not be written"
    with pytest.raises(InvalidInput, match="its queue says what it computes"):
        ProtocolLayout(WALKS, pipelined([0, 1, 2]), "queue")
