"""Accounts, critical path, summary and overhead: against runs whose every time is known, and against sums."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from tests.trace.made import MATH, STORE, SWITCH, T1, T2, T3, T4, WORKERS, pipeline, random_trace, table
from tilerelay.graph.catalog import dense_chain
from tilerelay.trace.events import COMPUTED, LOADED, PUBLISHED, SEEN, STAGE, Trace
from tilerelay.trace.overhead import PAPER_US, QUANTITIES, overhead
from tilerelay.trace.path import ARRIVAL, START, TURN, critical_path, hops, path_time
from tilerelay.trace.spans import CATEGORIES, partition, spans
from tilerelay.trace.summary import summarise
from tilerelay.trace.text import amount, summary_lines

seeds = pytest.mark.parametrize("seed", range(40))
# Two tiles of one stage on one GPU, then one tile that needs both, on another: a workload of 1 x 2 and 1 x 1 tiles.
SMALL = dense_chain(64, [64, 128, 64], tile=(64, 64))


def small(kernel: str = "classical", *, late: int = 0) -> Trace:
    records = [
        ((0, 0, 0, 0), (0, 2, 5, 100, 110, 120)),
        ((0, 1, 0, 0), (130, 132, 135, 230, 240, 250)),
        ((1, 0, 1, 0), (253 + late, 254 + late, 260 + late, 360 + late, 370 + late, 371 + late)),
    ]
    return table(SMALL, records, kernel)


@seeds
def test_every_workers_time_is_cut_without_gaps_or_overlaps(seed: int) -> None:
    trace = random_trace(np.random.default_rng(seed))
    cut = partition(trace)
    for device, worker in trace.walks:
        here = (cut.device == device) & (cut.worker == worker)
        begin, end = cut.begin[here], cut.end[here]
        assert (begin[0], end[-1]) == (trace.begin, trace.end)
        assert (begin[1:] == end[:-1]).all() and (end > begin).all()
    edges = np.linspace(trace.begin, trace.end, 14)
    for device in trace.devices:
        assert cut.shares(device, edges).sum(axis=0) == pytest.approx(np.ones(13))


@seeds
def test_math_is_counted_in_full_and_before_all_else(seed: int) -> None:
    trace = random_trace(np.random.default_rng(seed))
    for (device, worker), walk in trace.walks.items():
        covered = np.zeros(trace.end, dtype=bool)
        for begin, end in trace.at[walk][:, [LOADED, COMPUTED]].tolist():
            covered[begin:end] = True
        cut = partition(trace)
        math = (cut.device == device) & (cut.worker == worker) & (cut.category == CATEGORIES.index("math"))
        assert (cut.end - cut.begin)[math].sum() == covered.sum()


def test_the_accounts_of_a_known_run() -> None:
    trace = small()
    cut = partition(trace)
    zero = dict.fromkeys(CATEGORIES, 0)
    first = {"prologue": 4, "first load": 6, "math": 190, "store": 20, "epilogue": 20, "waiting": 10, "tail": 121}
    second = {"ramp": 253, "prologue": 1, "first load": 6, "math": 100, "store": 10, "epilogue": 1}
    assert cut.time(0) == {**zero, **first}
    assert cut.time(1) == {**zero, **second}
    assert sum(cut.time().values()) == 2 * 371


@seeds
def test_phases_of_a_role_do_not_overlap(seed: int) -> None:
    trace = random_trace(np.random.default_rng(seed))
    for _, _, found in spans(trace):
        assert all(a.end <= b.begin for a, b in pairwise(found))
        assert all(s.end > s.begin for s in found)


def test_all_phases_of_a_known_run_are_there() -> None:
    trace = pipeline()
    lengths = {"prologue": T3, "math": MATH, "store": STORE, "epilogue": T1}
    found = [span for _, _, role in spans(trace) for span in role]
    for phase, length in lengths.items():
        assert [s.end - s.begin for s in found if s.phase == phase] == [length] * len(trace)


@seeds
def test_the_critical_paths_parts_add_up_to_the_run(seed: int) -> None:
    trace = random_trace(np.random.default_rng(seed))
    steps = critical_path(trace)
    assert all(a.end == b.begin for a, b in pairwise(steps))
    assert steps[-1].end == trace.end
    assert sum(path_time(steps).values()) == steps[-1].end - steps[0].begin
    assert steps[0].bound == START and START not in {s.bound for s in steps[1:]}
    assert all(min(s.parts.values()) >= 0 for s in steps)


def test_a_classical_path_goes_through_the_whole_cta() -> None:
    trace = small()
    steps = critical_path(trace)
    assert [(s.record, s.bound, s.begin, s.end) for s in steps] == [
        (0, START, 0, 120), (1, TURN, 120, 250), (2, ARRIVAL, 250, 371),
    ]  # fmt: skip
    assert steps[1].parts[TURN] == 10 and steps[2].parts["flight"] == 3
    assert path_time(steps)["math"] == 95 + 95 + 100
    assert hops(trace, steps) == [(0, 2), (1, 1)]


def test_a_persistent_path_turns_where_the_math_is_free() -> None:
    trace = small("persistent")
    steps = critical_path(trace)
    assert [(s.begin, s.end) for s in steps] == [(0, 100), (100, 250), (250, 371)]


def test_who_came_later_bound_the_tile() -> None:
    """The consumer's worker has a tile of its own before: the path follows it when it ends after the arrival."""
    workload = dense_chain(128, [64, 64, 64], tile=(64, 64))
    producers = [((0, 0, 0, 0), (0, 1, 2, 10, 12, 15)), ((0, 1, 0, 1), (0, 1, 2, 10, 12, 60))]
    for busy_until, bound in ((50, ARRIVAL), (70, TURN)):
        consumers = [
            ((1, 0, 1, 0), (16, 17, 18, busy_until - 4, busy_until - 2, busy_until)),
            ((1, 1, 1, 0), (80, 81, 82, 90, 92, 95)),
        ]
        assert critical_path(table(workload, producers + consumers))[-1].bound == bound


def test_clocks_that_are_off_do_not_break_the_path() -> None:
    trace = small(late=-100)
    steps = critical_path(trace)
    assert sum(path_time(steps).values()) == steps[-1].end - steps[0].begin
    assert all(min(s.parts.values()) >= 0 for s in steps)


def test_ramp_steady_state_and_tail_of_a_known_run() -> None:
    trace = small()
    summary = summarise(trace)
    assert (summary.total, summary.ramp, summary.steady, summary.tail) == (371, 254, 0, 117)
    trace = pipeline()
    summary = summarise(trace)
    # One wave of workers makes two panels of two tiles at once; then the consumer starts.
    assert summary.ramp == 1 * (T3 + T4 + MATH + STORE + T1) + T2 + T3
    first, second = (trace.at[trace.keys[:, STAGE] == stage] for stage in (0, 1))
    assert summary.tail == second[:, PUBLISHED].max() - first[:, PUBLISHED].max()
    assert summary.ramp + summary.steady + summary.tail == summary.total
    assert all(sum(d.share.values()) == pytest.approx(1) for d in summary.devices)
    assert summary.devices[0].share["math"] == pytest.approx(3 * MATH / summary.total)
    assert summary.idle == pytest.approx(sum(d.idle for d in summary.devices) / 2)


def test_bytes_over_the_links_are_those_of_tiles_with_a_reader_elsewhere() -> None:
    summary = summarise(pipeline())
    (link,) = summary.links
    assert (link.source, link.target, link.bytes) == (0, 1, 768 * 512 * 2)
    ragged = dense_chain(100, [64, 100, 64], tile=(64, 64))
    times = (0, 1, 2, 3, 4, 5)
    made = [((0, t, t % 2, 0), times) for t in range(4)]
    read = [((1, 0, 1, 1), times), ((1, 1, 0, 1), times)]
    found = {(k.source, k.target): k.bytes for k in summarise(table(ragged, made + read)).links}
    # Row 0's tiles (64 x 64 on GPU 0, 64 x 36 on 1) are read on GPU 1, row 1's (36 rows) on GPU 0.
    assert found == {(0, 1): 64 * 64 * 2, (1, 0): 36 * 36 * 2}


def test_the_overhead_of_a_known_run() -> None:
    trace = pipeline()
    found = overhead(trace)
    assert found.keys() == QUANTITIES.keys()
    medians = {name: q.median for name, q in found.items()}
    assert medians == pytest.approx(
        {"T1": T1 / 1e3, "T2": T2 / 1e3, "T3": T3 / 1e3, "T4": T4 / 1e3, "drain": STORE / 1e3}
    )
    tiles = len(trace) // 2
    assert (found["T1"].of, found["T3"].of, found["T2"].of) == (tiles, tiles, tiles)
    # The first wave's tiles and no others found their worker idle.
    assert found["T4"].tiles <= found["T2"].tiles
    # Producers: two of three waves' epilogues run under the next wave's math; stores all but the switch of it.
    assert found["T1"].hidden == pytest.approx(2 / 3)
    assert found["drain"].hidden == pytest.approx(2 / 3 * (STORE - SWITCH) / STORE)


def test_a_tile_that_did_not_wait_does_not_count_for_t2() -> None:
    assert overhead(small())["T2"].tiles == 1
    busy = table(
        dense_chain(128, [64, 64, 64], tile=(64, 64)),
        [
            ((0, 0, 0, 0), (0, 1, 2, 10, 12, 15)),
            ((0, 1, 0, 1), (0, 1, 2, 10, 12, 60)),
            ((1, 0, 1, 0), (16, 17, 18, 66, 68, 70)),
            ((1, 1, 1, 0), (80, 81, 82, 90, 92, 95)),
        ],
    )
    t2 = overhead(busy)["T2"]
    assert (t2.tiles, t2.of, t2.hidden, t2.median) == (1, 2, 0.5, pytest.approx(0.001))


def test_a_classical_kernel_hides_nothing_of_its_own_and_has_no_hand_over() -> None:
    records = [
        (k, (t[0], t[1], -1, *t[3:])) for k, t in zip(small().keys.tolist(), small().times.tolist(), strict=True)
    ]
    found = overhead(table(SMALL, records))
    assert "T4" not in found
    assert found["T1"].hidden == found["T3"].hidden == 0


def test_a_stage_without_a_reader_publishes_nothing_unless_told_so() -> None:
    trace = pipeline()
    alone = trace.rows(0, 6)
    only = alone.keys[:, STAGE] == 0
    one = type(alone)(alone.stages, (), alone.clock, {}, alone.keys[only], alone.times[only])
    assert overhead(one) == {}
    assert overhead(one, publishing=[0])["T1"].of == only.sum()


def test_the_papers_figures_are_of_known_quantities() -> None:
    assert all(set(figures) <= set(QUANTITIES) for figures in PAPER_US.values())


def test_durations_are_read_easily() -> None:
    texts = {12: "12 ns", 3_440: "3.4 us", 3_440_000: "3440 us", 34_400_000: "34 ms", 2 * 10**10: "20.0 s"}
    assert {time: amount(time, "ns") for time in texts} == texts
    assert amount(17, "steps") == "17 steps"


def test_the_summary_names_what_matters() -> None:
    text = "\n".join(summary_lines(pipeline()))
    for part in (
        "ramp",
        "steady",
        "tail",
        "GPU 0 (layer0)",
        "GPU 1 (layer1)",
        "GPU 0 -> GPU 1: 0.8 MB",
        "critical path",
    ):
        assert part in text
    assert pipeline().at[:, SEEN].min() == 0 and WORKERS == 4
