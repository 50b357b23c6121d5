"""From a run to its table: virtual devices, the reference executor, and stamps as GPUs leave them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.trace.made import START, WORKERS, pipeline_stamps
from tilerelay import InvalidInput, Pipeline, TilerelayError, dense_chain, pipelined, sharded
from tilerelay.graph.placement import Placement
from tilerelay.graph.tiling import grouped_order
from tilerelay.graph.workload import Workload, with_orders
from tilerelay.protocol.layout import SIGNALLINGS
from tilerelay.protocol.reference import run
from tilerelay.protocol.tracing import trace_events
from tilerelay.runtime import pipeline as pipeline_module
from tilerelay.runtime import tracing, virtual
from tilerelay.runtime.clocks import Alignment, Reading
from tilerelay.runtime.tracing import StageRun, assemble, buffer_bytes, check_room, tickets, trace_of, trace_run
from tilerelay.runtime.virtual_workers import Workers
from tilerelay.trace.events import COMPUTED, EVENTS, OBTAINED, PUBLISHED, STAGE, TILE, WORKER, Trace
from tilerelay.trace.path import critical_path
from tilerelay.trace.summary import summarise

CHAIN = dense_chain(192, [64, 128, 64], tile=(64, 64))  # 3 x 2 and 3 x 1 tiles


# Virtual devices


@pytest.fixture
def make(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes pipelines on the shared workers and closes them."""

    class Shared(virtual.VirtualPipeline):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs, workers=workers)

    monkeypatch.setattr(pipeline_module, "VirtualPipeline", Shared)
    made: list[Pipeline] = []

    def one(workload: Workload, **options: Any) -> tuple[Pipeline, torch.Tensor]:
        weights = [torch.randn(s.grid.n, s.k).bfloat16() for s in workload.stages]
        made.append(Pipeline(workload, weights, backend="cpu", **options))
        return made[-1], torch.randn(workload.stages[0].grid.m, workload.stages[0].k).bfloat16()

    yield one
    for pipe in made:
        pipe.close()


def check_causes(trace: Trace) -> None:
    """No tile was obtained before its prerequisites were published, up to the publishing side's own last step."""
    for record, needed in enumerate(trace.last_prerequisite.tolist()):
        if needed >= 0:
            assert trace.at[record, OBTAINED] > trace.at[needed, COMPUTED]


@pytest.mark.parametrize("grouped", [True, False], ids=["groups", "per tile"])
@pytest.mark.parametrize("signalling", SIGNALLINGS)
def test_a_run_on_virtual_devices(make: Any, signalling: str, grouped: bool) -> None:
    workload = dense_chain(192, [64, 128, 64], tile=(64, 64), grouped=grouped)
    pipe, x = make(workload, signalling=signalling, trace=True)
    for _ in range(3):  # the ring wraps
        trace = trace_run(pipe, x)
    assert len(trace) == 9 and trace.backward == 0 and trace.begin == 0
    assert (trace.clock.source, trace.clock.error) == ("monotonic", 0)
    recorded = trace.times >= 0
    assert recorded[:, [e for e in range(len(EVENTS)) if e != 2]].all() and not recorded[:, 2].any()
    check_causes(trace)
    # A process runs its CTAs one after another, in the order of their tickets: they obtain their tiles in that order.
    for stage in range(2):
        order = tickets(pipe._run.workspace, stage)
        records = trace.record_of[stage][order]
        assert sorted(order.tolist()) == list(range(workload.stages[stage].grid.tiles))
        assert (np.diff(trace.at[records, OBTAINED]) > 0).all()
    assert summarise(trace).total == trace.end
    assert trace.keys[critical_path(trace)[-1].record, STAGE] == 1


def test_tickets_follow_a_stages_own_order(make: Any) -> None:
    first = CHAIN.stages[0]
    workload = replace(CHAIN, stages=(replace(first, order=grouped_order(first.grid, 3)), CHAIN.stages[1]))
    pipe, x = make(workload, trace=True)
    trace = trace_run(pipe, x)
    walk = [int(trace.keys[r, TILE]) for r in trace.walks[0, 0]]
    assert walk == tickets(pipe._run.workspace, 0).tolist() == [0, 2, 4, 1, 3, 5]


@pytest.mark.parametrize("signalling", SIGNALLINGS)
def test_a_pipeline_that_was_not_run_has_no_trace(make: Any, signalling: str) -> None:
    pipe, _ = make(CHAIN, trace=True, signalling=signalling)
    with pytest.raises(InvalidInput, match="to its end first"):
        trace_of(pipe)


def test_a_ring_of_another_run_is_noticed(make: Any) -> None:
    pipe, x = make(CHAIN, trace=True, signalling="queue")
    pipe(x)
    assert sorted(tickets(pipe._run.workspace, 1).tolist()) == [0, 1, 2]
    pipe._run.workspace.stage(1, "epoch").add_(1)
    with pytest.raises(TilerelayError, match="run 2; run it to the end"):
        tickets(pipe._run.workspace, 1)


def test_a_pipeline_that_keeps_no_times_has_no_trace(make: Any) -> None:
    pipe, x = make(CHAIN)
    pipe(x)
    with pytest.raises(InvalidInput, match="trace=True"):
        trace_of(pipe)


# The reference executor


@pytest.mark.parametrize("placement", ["0,1,2", "0:2,0:2,1:4"])
@pytest.mark.parametrize("signalling", SIGNALLINGS)
def test_the_reference_executor_writes_the_same_table(signalling: str, placement: str) -> None:
    workload = dense_chain(500, [64, 700, 512, 300], tile=(128, 128))
    where, counts = Placement.parse(placement), [3, 4, 2]
    events = run(workload, where, signalling, counts, epochs=2, first_epoch=5)
    for epoch in (5, 6):
        trace = trace_events(workload, where, signalling, counts, events, epoch)
        assert len(trace) == workload.tiles and trace.clock.unit == "steps"
        check_causes(trace)
        assert len(trace.walks) == sum(counts)
        summary = summarise(trace)
        assert summary.total == trace.end > 0 and len(summary.devices) == len(where.devices)
    with pytest.raises(InvalidInput, match="epochs are"):
        trace_events(workload, where, signalling, counts, events, 7)
    with pytest.raises(InvalidInput, match="every tile"):
        trace_events(workload, where, signalling, counts, events[: len(events) // 4], 5)


# Stamps as GPUs leave them


def gpu_runs(kernel: str, workers: int | None) -> tuple[Workload, dict[int, StageRun]]:
    workload = with_orders(dense_chain(768, [512] * 3, tile=(128, 256)), [WORKERS] * 2)
    stamps, order = pipeline_stamps(workload)
    return workload, {i: StageRun(i, kernel, stamps[i], order[i], workers) for i in range(2)}


def test_a_persistent_cta_has_every_so_many_th_ticket() -> None:
    workload, runs = gpu_runs("persistent", WORKERS)
    trace = assemble(workload, runs, "globaltimer", None, {})
    for stage in range(2):
        records = trace.record_of[stage][runs[stage].tickets]
        assert trace.keys[records, WORKER].tolist() == [t % WORKERS for t in range(12)]
    assert all(stage.workers_known and stage.workers == WORKERS for stage in trace.stages)


def test_classical_ctas_are_put_where_there_was_room() -> None:
    """Three places; a CTA goes to the one that was free first. The fourth tile waits for the third's place."""
    workload = dense_chain(64 * 5, [64, 64], tile=(64, 64))
    spans = [(10, 100), (11, 200), (12, 50), (60, 150), (110, 300)]
    stamps = np.array([[a, a, a, b - 3, b - 2, b] for a, b in spans], dtype=np.int64)
    order = np.array([2, 0, 1, 3, 4], dtype=np.int32)
    trace = assemble(workload, {0: StageRun(0, "classical", stamps, order, None)}, "globaltimer", None, {})
    who = trace.keys[:, WORKER].tolist()
    assert (trace.stages[0].workers, trace.stages[0].workers_known) == (3, False)
    assert who == [1, 2, 0, 0, 1]


def test_stages_on_one_device_have_workers_of_their_own() -> None:
    workload, runs = gpu_runs("persistent", WORKERS)
    trace = assemble(workload, {i: replace(r, device=0) for i, r in runs.items()}, "globaltimer", None, {})
    assert sorted(trace.walks) == [(0, w) for w in range(2 * WORKERS)]


def test_devices_clocks_are_put_on_one() -> None:
    """The second device's clock is 12 us ahead and gains 1 us while the first stamps run; taken off again."""
    workload, runs = gpu_runs("persistent", WORKERS)
    plain = assemble(workload, runs, "globaltimer", None, {})
    span = plain.end

    def clock(t: Any) -> Any:
        return t + 12_000 + (t - START) * 1000 // span

    def at(t: int) -> Reading:
        return Reading(clock(t), clock(t) - t, 1300.0, 2700, 32)

    alignment = Alignment(0, {1: at(START - 5_000)}, {1: at(START + span + 5_000)})
    ahead = {**runs, 1: replace(runs[1], stamps=np.where(runs[1].stamps > 0, clock(runs[1].stamps), 0))}
    trace = assemble(workload, ahead, "globaltimer", alignment, {})
    assert np.abs(trace.times - plain.times).max() <= 2
    assert trace.clock.offsets[0] == 0 and 12_000 < trace.clock.offsets[1] < 13_000
    assert trace.clock.error == pytest.approx(1300 + 1000, abs=60)
    assert np.abs(assemble(workload, ahead, "globaltimer", None, {}).times - plain.times).max() > 10_000


def test_the_clocks_granularity_comes_from_the_stamps() -> None:
    workload, runs = gpu_runs("persistent", WORKERS)
    coarse = {i: replace(r, stamps=r.stamps // 32 * 32) for i, r in runs.items()}
    assert assemble(workload, coarse, "globaltimer", None, {}).clock.granularity == 32


def test_a_stage_that_did_not_run_is_left_out() -> None:
    workload, runs = gpu_runs("persistent", WORKERS)
    trace = assemble(workload, {0: runs[0]}, "globaltimer", None, {})
    assert len(trace) == 12 and trace.at[:, PUBLISHED].max() == trace.end


def test_ctas_of_one_kernel_go_on_where_they_stopped() -> None:
    """Two stages in one kernel: the second one's first ticket is the sixth of five workers: worker 1."""
    workload = dense_chain(64 * 6, [64, 64, 64], tile=(64, 64))
    order = np.arange(6, dtype=np.int32)
    first, second = (np.arange(36, dtype=np.int64).reshape(6, 6) + after for after in (1, 100))
    runs = {
        0: StageRun(0, "persistent", first, order, 5, 0, 7),
        1: StageRun(0, "persistent", second, order, 5, 6, 7),
    }
    trace = assemble(workload, runs, "globaltimer", None, {})
    assert trace.keys[:, WORKER].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]
    apart = assemble(workload, {**runs, 1: replace(runs[1], program=8)}, "globaltimer", None, {})
    assert apart.keys[:, WORKER].tolist() == [0, 1, 2, 3, 4, 0, 6, 7, 8, 9, 5, 6]


def test_a_program_has_as_many_workers_as_its_widest_stage() -> None:
    order = np.arange(6, dtype=np.int32)
    workload = dense_chain(64 * 6, [64] * 4, tile=(64, 64))
    stamps = [np.arange(36, dtype=np.int64).reshape(6, 6) + 1 + 100 * i for i in range(3)]
    sizes = [(5, 1), (2, 1), (3, 2)]  # workers, program
    runs = {i: StageRun(0, "persistent", stamps[i], order, n, 0, p) for i, (n, p) in enumerate(sizes)}
    who = assemble(workload, runs, "globaltimer", None, {}).keys[:, WORKER].reshape(3, 6)
    assert [sorted(set(row)) for row in who.tolist()] == [[0, 1, 2, 3, 4], [0, 1], [5, 6, 7]]


def test_a_trace_does_not_begin_with_a_copy_of_the_input(make: Any) -> None:
    """It would show as a late start of the devices that x is copied to."""
    pipe, x = make(CHAIN, placement=sharded([128, 64], [0, 1]), trace=True)
    with pytest.raises(InvalidInput, match="x is given on 1 of the first stage's 2 devices; give it on each"):
        trace_run(pipe, x)


def test_stages_cut_by_columns_are_traced_part_by_part(make: Any) -> None:
    workload = dense_chain(192, [64, 128, 128], tile=(64, 64))
    pipe, x = make(workload, placement=sharded([128, 128], [0, 1]), trace=True)
    trace = trace_run(pipe, [x, x])
    assert len(trace.stages) == 4 and len(trace.edges) == 4
    check_causes(trace)
    assert sorted(trace.walks) == [(0, 0), (1, 0)]  # a worker walks through both stages
    for walk in trace.walks.values():
        assert sorted(trace.keys[walk, STAGE].tolist()) in ([0] * 3 + [2] * 3, [1] * 3 + [3] * 3)
    # Every tile of the first stage is read on the other device, too: 192 x 64 elements each way.
    assert {(k.source, k.target, k.bytes) for k in summarise(trace).links} == {
        (0, 1, 192 * 64 * 2), (1, 0, 192 * 64 * 2),
    }  # fmt: skip


# Room


def test_stamps_that_do_not_fit_are_refused_with_their_size() -> None:
    placement = pipelined([0, 1])
    assert buffer_bytes(CHAIN, placement) == {0: 6 * 48, 1: 3 * 48}
    check_room(CHAIN, placement, lambda device: 6 * 48)
    with pytest.raises(InvalidInput, match=r"need 288 bytes on device 0, 287 are free; trace 128 rows"):
        check_room(CHAIN, placement, lambda device: 287)
    with pytest.raises(InvalidInput, match=r"on device 1, 10 are free; trace fewer rows"):
        check_room(CHAIN, placement, lambda device: [10**6, 10][device])
    small = dense_chain(128, [64, 128, 64], tile=(64, 64))
    check_room(small, placement, lambda device: 287)  # the advice holds
    assert tracing.free_bytes("cpu")(0) > 2**20
