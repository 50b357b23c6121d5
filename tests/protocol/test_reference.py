"""The protocol under the reference executor: every graph runs to completion, and every mistake is caught."""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.protocol.graphs import EPOCHS, placements, workloads
from tilerelay.errors import InvalidInput, PipelineAborted
from tilerelay.graph.catalog import dense_chain
from tilerelay.graph.dependency import from_prerequisites
from tilerelay.graph.placement import pipelined
from tilerelay.graph.tiling import TileGrid
from tilerelay.graph.workload import Edge, Stage, Workload
from tilerelay.protocol.layout import SIGNALLINGS, ProtocolLayout, wrap32
from tilerelay.protocol.ledger import InvariantBroken, Ledger
from tilerelay.protocol.reference import FAULTS, SCHEDULERS, Event, Fault, Memory, ReferenceExecutor, run

CHAIN = dense_chain(500, [64, 700, 512, 300], tile=(128, 128))  # 4 x 6, 4 x 4 and 4 x 3 tiles
PER_TILE = dense_chain(500, [64, 700, 512, 300], tile=(128, 128), grouped=False)
DEVICES = pipelined([0, 1, 2])
WORKERS = [3, 4, 2]
signallings = pytest.mark.parametrize("signalling", SIGNALLINGS)
schedulers = pytest.mark.parametrize("scheduler", SCHEDULERS)
first_epochs = pytest.mark.parametrize("first_epoch", EPOCHS)


def check_events(workload: Workload, events: list[Event], epochs: int, first_epoch: int) -> None:
    """Judge the run by its events alone, without the executor's own ledger."""
    assert [e.step for e in events] == sorted(e.step for e in events)
    step = {(e.what, e.epoch, e.stage, e.tile): e.step for e in events}
    runs = [int(wrap32(first_epoch + r)) for r in range(epochs)]
    tiles = [(s, t) for s, stage in enumerate(workload.stages) for t in range(stage.grid.tiles)]
    expected = Counter((what, r, s, t) for what in ("started", "finished") for r in runs for s, t in tiles)
    assert Counter((e.what, e.epoch, e.stage, e.tile) for e in events) == expected
    for r in runs:
        for s, t in tiles:
            assert step["started", r, s, t] < step["finished", r, s, t]
        for edge in workload.edges:
            for t, group in enumerate(edge.dependencies.group_of):
                for p in edge.dependencies.prerequisites_of(int(group)):
                    assert step["finished", r, edge.producer, p] < step["started", r, edge.consumer, t]


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_any_graph_runs_to_completion(data: st.DataObject) -> None:
    workload = data.draw(workloads())
    epochs, first_epoch = data.draw(st.integers(1, 4)), data.draw(st.sampled_from(EPOCHS))
    events = run(
        workload,
        data.draw(placements(len(workload.stages))),
        data.draw(st.sampled_from(SIGNALLINGS)),
        data.draw(st.lists(st.integers(1, 4), min_size=len(workload.stages), max_size=len(workload.stages))),
        seed=data.draw(st.integers(0, 2**32)),
        scheduler=data.draw(st.sampled_from(list(SCHEDULERS))),
        epochs=epochs,
        first_epoch=first_epoch,
    )
    check_events(workload, events, epochs, first_epoch)


@signallings
@schedulers
@first_epochs
@pytest.mark.parametrize("workload", [CHAIN, PER_TILE], ids=["grouped", "per tile"])
def test_a_chain_of_gemms(workload: Workload, signalling: str, scheduler: str, first_epoch: int) -> None:
    """Both forms of the scoreboard, many interleavings; with four runs of four or twelve entries, rings wrap."""
    for seed in range(10):
        events = run(
            workload, DEVICES, signalling, WORKERS, seed=seed, scheduler=scheduler, epochs=4, first_epoch=first_epoch
        )
        check_events(workload, events, 4, first_epoch)


@signallings
def test_a_ring_of_any_size_wraps(signalling: str) -> None:
    """Entries that do not divide the capacity: every run begins at another slot."""
    for tiles in (1, 2, 3, 5, 7):
        stages = (Stage("a", TileGrid(1, tiles, 1, 1), 1), Stage("b", TileGrid(1, tiles, 1, 1), 1))
        workload = Workload(stages, (Edge(0, 1, from_prerequisites(tiles, [[t] for t in range(tiles)])),))
        for first_epoch in EPOCHS:
            run(workload, pipelined([0, 1]), signalling, [2, 2], epochs=9, first_epoch=first_epoch)


@signallings
def test_classical_grids_have_a_cta_for_every_tile(signalling: str) -> None:
    check_events(CHAIN, run(CHAIN, DEVICES, signalling, [24, 16, 12], epochs=2), 2, 1)


@signallings
def test_stages_overlap(signalling: str) -> None:
    """The point of it all: consumers start before producers end."""
    events = run(CHAIN, DEVICES, signalling, WORKERS)
    first_start = [min(e.step for e in events if e.stage == s and e.what == "started") for s in range(3)]
    last_finish = [max(e.step for e in events if e.stage == s and e.what == "finished") for s in range(3)]
    assert first_start[1] < last_finish[0] and first_start[2] < last_finish[1]


def test_runs_overlap_as_far_as_rule_9_allows() -> None:
    """The first stage is in its second run while the last is still in its first; never ahead of its own reader."""
    ahead = False
    for seed in range(20):
        events = run(CHAIN, DEVICES, "queue", WORKERS, seed=seed, scheduler="adversarial", epochs=3)
        last = {(e.epoch, e.stage): e.step for e in events if e.what == "finished"}
        for e in events:
            if e.what == "started" and e.epoch > 1 and e.stage < 2:
                assert last[e.epoch - 1, e.stage + 1] < e.step
                ahead |= e.stage == 0 and e.step < last[e.epoch - 1, 2]
    assert ahead


def test_queue_signalling_takes_tiles_as_they_come_and_counter_signalling_in_its_own_order() -> None:
    """One worker a stage; the first stage makes its panels backwards."""
    stages = (Stage("a", TileGrid(3, 2, 1, 1), 1, order=[4, 5, 2, 3, 0, 1]), Stage("b", TileGrid(3, 2, 1, 1), 2))
    workload = Workload(stages, (Edge(0, 1, from_prerequisites(6, [[0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5]])),))

    def order(signalling: str) -> list[int]:
        events = run(workload, pipelined([0, 1]), signalling, [1, 1])
        return [e.tile for e in events if e.stage == 1 and e.what == "started"]

    assert order("queue") == [4, 5, 2, 3, 0, 1]
    assert order("counter") == [0, 1, 2, 3, 4, 5]


def test_a_seed_repeats_a_run_exactly_and_another_does_not() -> None:
    def events(seed: int) -> list[Event]:
        return run(CHAIN, DEVICES, "queue", WORKERS, seed=seed)

    assert events(1) == events(1) != events(2)


@signallings
def test_memory_at_the_end(signalling: str) -> None:
    layout = ProtocolLayout(CHAIN, DEVICES, signalling)
    first_epoch, epochs = 2**32 - 2, 3
    executor = ReferenceExecutor(layout, WORKERS, epochs=epochs, first_epoch=first_epoch, fault=None)
    executor.execute(Random(0), 1.0)
    executor.check_end()
    memory = executor.memory
    assert [int(memory.stage(s, "epoch")[0]) for s in range(3)] == [1, 1, 1]  # -2, -1, 0, and now 1
    assert (memory.stage(0, "published") == 0).all() and (memory.stage(1, "published") == 0).all()
    assert (memory.stage(2, "published") == -3).all(), "the last stage has nobody to publish to"
    need, entries = 6, 4
    assert (memory.edge(0, "scoreboard") == wrap32((first_epoch + epochs - 1) * need)).all()
    if signalling == "queue":
        assert memory.edge(0, "tail")[0] == wrap32((first_epoch + epochs - 1) * entries)
        assert sorted(int(entry) & 0xFFFFFFFF for entry in memory.edge(0, "ring")) == [0, 1, 2, 3]
        assert memory.stage(1, "wake")[0] == 0


@pytest.mark.parametrize(
    ("where", "name"),
    [
        *(("stage", name) for name in ("epoch", "finished", "abort", "published", "wake")),
        *(("edge", name) for name in ("scoreboard", "tail")),
    ],
)
def test_the_check_at_the_end_looks_at_every_word(where: str, name: str) -> None:
    executor = ReferenceExecutor(ProtocolLayout(CHAIN, DEVICES, "queue"), WORKERS, epochs=1, first_epoch=1, fault=None)
    executor.execute(Random(0), 1.0)
    executor.check_end()
    getattr(executor.memory, where)(1, name)[-1] += 1
    with pytest.raises(InvariantBroken, match=f"{name} is .* at the end"):
        executor.check_end()


# Negative controls: a protocol with a mistake in it must not pass.


def outcomes(fault: Fault, signalling: str, workload: Workload = CHAIN) -> list[str]:
    """What 30 interleavings of the faulty protocol end with; "" when one passes."""
    found = []
    for seed in range(30):
        try:
            run(workload, DEVICES, signalling, WORKERS, seed=seed, scheduler="adversarial", epochs=2, fault=fault)
            found.append("")
        except (InvariantBroken, PipelineAborted) as error:
            found.append(str(error))
    return found


@signallings
@pytest.mark.parametrize("workload", [CHAIN, PER_TILE], ids=["grouped", "per tile"])
@pytest.mark.parametrize(
    ("kind", "messages"),
    [
        ("lose_publish", ["deadlock"]),
        ("publish_twice", ["above epoch * need", "is pushed before", "starts before"]),
        ("publish_early", ["is published before it is finished"]),
    ],
)
def test_a_mistake_in_publishing_is_always_caught(
    kind: str, messages: list[str], signalling: str, workload: Workload
) -> None:
    for outcome in outcomes(Fault(kind, 1, ticket=2), signalling, workload):
        assert any(message in outcome for message in messages), outcome


@signallings
def test_a_consumer_that_does_not_wait_is_caught(signalling: str) -> None:
    found = outcomes(Fault("skip_wait", 1, ticket=0), signalling)
    assert any("starts before tile" in outcome for outcome in found)


def test_an_old_queue_entry_read_without_waiting_gives_a_tile_twice() -> None:
    """Ticket 9 is the first of the last group; before its entry comes, the slot names group 0."""
    found = outcomes(Fault("skip_wait", 2, ticket=9), "queue")
    assert any("is not computed exactly once" in outcome for outcome in found)


@signallings
def test_a_writer_that_does_not_wait_for_the_last_runs_readers_is_caught(signalling: str) -> None:
    found = outcomes(Fault("skip_reuse_wait", 0), signalling)
    assert any("is overwritten while tile" in outcome for outcome in found)


ELSEWHERE = ("skip_sum_wait", "skip_step_wait", "lose_turn", "announce_unsent")  # see test_walks and test_turns


@pytest.mark.parametrize("kind", [kind for kind in FAULTS if kind not in ELSEWHERE])
def test_no_fault_passes_every_interleaving(kind: str) -> None:
    assert any(outcomes(Fault(kind, 0 if kind == "skip_reuse_wait" else 1), "queue"))


@signallings
def test_a_deadlock_names_who_waits_for_which_tiles(signalling: str) -> None:
    with pytest.raises(PipelineAborted) as caught:
        run(CHAIN, DEVICES, signalling, WORKERS, fault=Fault("lose_publish", 0, ticket=7))
    # Tile 7 of layer0 is in panel 1, and so are tiles 4 to 7 of layer1, and 3 to 5 of layer2.
    assert str(caught.value).startswith("deadlock, nobody can go on:\n")
    waits = caught.value.waits
    assert any(w.startswith("layer1, ") and w.endswith("waits for tiles [7] of layer0 (group 1)") for w in waits)
    assert any(w.startswith("layer2, ") and "of layer1 (group 1)" in w for w in waits)
    assert not any(w.startswith("layer0, ") for w in waits)


def test_a_ring_slot_is_not_overwritten_before_it_is_consumed() -> None:
    """The check itself: a run that pushes while a tile of the slot's last entry is not finished."""
    ledger = Ledger(CHAIN, DEVICES.device_of)

    def panel(run: int) -> None:
        for tile in range(6):
            ledger.start(0, tile, run)
            ledger.finish(0, tile, run)
            ledger.publish(0, tile, run)

    panel(0)
    ledger.push(0, 0, [0, 1, 2, 3], 0, 0)
    for tile in range(4):
        ledger.start(1, tile, 0)
    for tile in range(3):
        ledger.finish(1, tile, 0)
    with pytest.raises(InvariantBroken, match="tile 0 of layer0 is overwritten while tile 3 of layer1 reads it"):
        panel(1)
    for tile in range(6):
        ledger._published[0][tile] = 1
    with pytest.raises(InvariantBroken, match="tile 3 of layer1 loses its entry in ring slot 0 before it is finished"):
        ledger.push(0, 0, [0, 1, 2, 3], 0, 1)


def test_a_group_is_pushed_once_and_complete() -> None:
    ledger = Ledger(CHAIN, DEVICES.device_of)
    for tile in range(6, 12):
        with pytest.raises(InvariantBroken, match=f"is pushed before tile {tile} of layer0 is published"):
            ledger.push(0, 1, [4, 5, 6, 7], 0, 0)
        ledger = Ledger(CHAIN, DEVICES.device_of)
        ledger._published[0][6 : tile + 1] = [0] * (tile - 5)
    ledger.push(0, 1, [4, 5, 6, 7], 0, 0)
    with pytest.raises(InvariantBroken, match="tile 4 of layer1 is not pushed exactly once in run 0"):
        ledger.push(0, 1, [4, 5, 6, 7], 1, 0)


def test_a_counter_stops_at_epoch_times_need() -> None:
    ledger = Ledger(CHAIN, DEVICES.device_of)
    ledger.count(0, 1, -5)
    ledger.count(0, 1, 0)
    with pytest.raises(InvariantBroken, match=r"tile 4 of layer1 has a counter 1 above epoch \* need"):
        ledger.count(0, 1, 1)


def test_memory_views_are_the_images() -> None:
    layout = ProtocolLayout(CHAIN, DEVICES, "queue")
    memory = Memory(layout, 1)
    memory.edge(0, "scoreboard")[2] = 7
    assert memory.edge(0, "scoreboard").tolist() == [0, 0, 7, 0]
    assert np.array_equal(Memory(layout, 1).edge(0, "scoreboard"), [0, 0, 0, 0])


@pytest.mark.parametrize("workers", [[1, 1], [1, 1, 0], [1, 1, 1, 1]])
def test_workers_that_do_not_fit_the_stages_are_refused(workers: list[int]) -> None:
    with pytest.raises(InvalidInput, match="give a positive number for each of the 3 stages"):
        run(CHAIN, DEVICES, "queue", workers)


def test_unknown_schedulers_and_faults_are_refused() -> None:
    with pytest.raises(InvalidInput, match="unknown scheduler 'fair'; choose one of random, adversarial"):
        run(CHAIN, DEVICES, "queue", WORKERS, scheduler="fair")
    with pytest.raises(InvalidInput, match="unknown fault 'gremlin'; choose one of lose_publish"):
        run(CHAIN, DEVICES, "queue", WORKERS, fault=Fault("gremlin", 0))
