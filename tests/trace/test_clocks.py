"""Clocks of devices: offsets from made-up bursts, the interpolation, and the kernels in two processes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tilerelay.errors import UnsupportedMachine
from tilerelay.graph.catalog import dense_chain
from tilerelay.kernels.compile import compile_call
from tilerelay.kernels.ping import ping, pong
from tilerelay.runtime.clocks import Alignment, Reading, reading
from tilerelay.runtime.virtual_memory import SharedTensors
from tilerelay.runtime.virtual_workers import Workers

sys.path.append(str(Path(__file__).parent))  # the workers get this process's path, and find the programs there
from trace_program import EXCHANGES, SHAPES, AloneProgram, PingProgram


def burst(rng: np.random.Generator, offset: int, granule: int, exchanges: int = 200) -> tuple[np.ndarray, ...]:
    """(sent, arrived, answered) with ways of 1 to 3 us there and back, on clocks that show multiples of a granule."""
    way = rng.integers(1000, 3000, (exchanges, 2))
    start = 10**15 + np.cumsum(way.sum(axis=1) + 100)
    times = start, start + way[:, 0] + offset, start + way.sum(axis=1)
    return tuple(t // granule * granule for t in times)


@pytest.mark.parametrize("granule", [1, 32, 1000])
@pytest.mark.parametrize("seed", range(20))
def test_the_offset_is_within_the_error_that_is_claimed(seed: int, granule: int) -> None:
    rng = np.random.default_rng(seed)
    offset = int(rng.integers(-20_000, 20_000))
    found = reading(*burst(rng, offset, granule))
    assert abs(found.offset - offset) <= found.error <= 1100 + 1.5 * granule
    assert found.granularity == granule
    assert found.round_trip >= 2000 - granule


@pytest.mark.parametrize("seed", range(20))
def test_a_coarse_clock_makes_the_error_larger(seed: int) -> None:
    """Ways of some ns on clocks that show microseconds: what a stamp hides is part of the error."""
    rng = np.random.default_rng(seed)
    start = 10**15 + np.cumsum(rng.integers(100, 5000, 200))
    offset = int(rng.integers(-5000, 5000))
    times = start, start + 10 + offset, start + 20
    found = reading(*(t // 1000 * 1000 for t in times))
    assert abs(found.offset - offset) <= found.error <= 1000


def test_words_that_did_not_arrive_are_named() -> None:
    sent, arrived, answered = burst(np.random.default_rng(0), 0, 1)
    arrived[150:] = 0
    with pytest.raises(UnsupportedMachine, match="50 of 200 words"):
        reading(sent, arrived, answered)


def test_a_clock_that_jumps_is_refused() -> None:
    sent, arrived, answered = burst(np.random.default_rng(0), 0, 1)
    arrived[100:] += 5_000
    with pytest.raises(UnsupportedMachine, match="jumped"):
        reading(sent, arrived, answered)


def at(time: float, offset: float, error: float = 1000.0) -> Reading:
    return Reading(time, offset, error, 2000, 32)


def test_drift_is_interpolated_and_counted_as_an_error() -> None:
    two = Alignment(0, {1: at(1000.0, 500.0)}, {1: at(3000.0, 700.0, 1200.0)})
    times = np.array([[1000, 2000], [3000, 1500]])
    assert two.offset(1, times).tolist() == [[500, 600], [700, 550]]
    assert two.offset(0, times).tolist() == [[0, 0], [0, 0]]
    assert two.error() == 1200 + 200
    assert two.to_json()["1"] == {"offset_ns": 500, "drift_ns": 200, "error_ns": 1200, "round_trip_ns": 2000}


def test_two_devices_that_are_not_the_reference_have_both_errors() -> None:
    readings = {1: at(0, 0, 10), 2: at(0, 0, 30), 3: at(0, 0, 20)}
    assert Alignment(0, readings, readings).error() == 50
    assert Alignment(0, {}, {}).error() == 0


@pytest.mark.parametrize("kernel", [ping, pong])
def test_the_kernels_compile_for_hopper(kernel: object) -> None:
    word, stamps = torch.zeros(1, dtype=torch.int32), torch.zeros(8, dtype=torch.int64)
    arguments = (word, word, stamps, stamps, 200, 1 << 22) if kernel is ping else (word, word, stamps, 200, 1 << 22)
    ptx = compile_call(kernel, arguments, {"num_warps": 1}).ptx  # type: ignore[arg-type]
    # Released with the time before, polled with acquire, both for another device.
    assert "atom.global.sys.release.exch" in ptx and "ld.global.sys.acquire" in ptx
    clock, send = ptx.index("%globaltimer"), ptx.index("release.exch")
    assert clock < send if kernel is ping else True


# In two processes


@pytest.fixture
def pair(workers: Workers) -> Iterator[tuple[int, SharedTensors]]:
    shared = SharedTensors(SHAPES)
    key = workers.make(PingProgram, [(), ()], shared.fd)
    yield key, shared
    workers.drop(key, 2)
    shared.close()


def test_two_processes_with_one_clock_find_no_offset(workers: Workers, pair: tuple[int, SharedTensors]) -> None:
    key, shared = pair
    workers.call(1, key, "pong", 100_000)
    workers.call(0, key, "ping", 100_000)
    workers.gather([0, 1], 60, "exchange words")
    found = reading(*(shared[name].numpy() for name in ("sent", "arrived", "answered")))
    assert abs(found.offset) <= found.error < 100e6
    assert found.round_trip > 0
    assert shared["reference"].tolist() == shared["other"].tolist() == [EXCHANGES]


@pytest.mark.parametrize(("side", "stamps"), [("ping", "answered"), ("pong", "arrived")])
def test_a_side_without_the_other_gives_up(
    workers: Workers, pair: tuple[int, SharedTensors], side: str, stamps: str
) -> None:
    key, shared = pair
    workers.call(0, key, side, 20)
    workers.gather([0], 60, "give up")
    assert not shared[stamps].any()


# A stage alone


@pytest.mark.parametrize(("consumer", "announce"), [(0, False), (0, True), (1, True)])
def test_a_stage_alone_runs_again_and_again(workers: Workers, consumer: int, announce: bool) -> None:
    shared = SharedTensors({"nothing": ((1,), torch.int32)})
    key = workers.make(AloneProgram, [()], shared.fd)
    workload = dense_chain(128, [64, 128, 64], tile=(64, 64))
    workers.call(0, key, "run", workload, consumer, announce, 3)
    seen = workers.gather([0], 60, "run")[0]
    workers.drop(key, 1)
    shared.close()
    assert seen["error"] < 0.3 and seen["epoch"] == 4
    # Two groups (row panels) that need two tiles each, counted in three runs; the last run's entries in the ring.
    assert seen["counters"] == ([6, 6] if announce else [0, 0])
    assert seen["ring"] == ([3, 3] if announce else [0, 0])
    times = np.array(seen["times"])
    recorded = times[:, [0, 1, 3, 4, 5]]
    assert (recorded >= 0).all() and (np.diff(recorded, axis=1) >= 0).all() and (times[:, 2] == -1).all()
