"""Medians, reductions, the order of measurement, deadlines, and clocks."""

from __future__ import annotations

import stat
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilerelay.baselines.deadline import Stuck, wait_until
from tilerelay.bench import clocks, sessions
from tilerelay.bench.rounds import interleave, order_of_round
from tilerelay.bench.statistics import middle, reduction, summarise
from tilerelay.errors import InvalidInput


def test_summary() -> None:
    summary = summarise([3.0, 100.0, 1.0, 2.0, 4.0])
    assert (summary.median_us, summary.min_us, summary.max_us) == (3.0, 1.0, 100.0)
    assert summarise([1.0, 2.0]).median_us == 1.5


@given(st.lists(st.floats(1e-3, 1e9), min_size=1))
def test_the_median_lies_between(times: list[float]) -> None:
    summary = summarise(times)
    assert summary.min_us <= summary.median_us <= summary.max_us


@pytest.mark.parametrize("times", [[], [0.0], [-1.0], [float("nan")], [1.0, float("inf")]])
def test_a_clock_that_failed_is_no_figure(times: list[float]) -> None:
    with pytest.raises(InvalidInput):
        summarise(times)


def test_reduction_is_a_share_of_theirs() -> None:
    assert reduction(75.0, 100.0) == 0.25
    assert reduction(125.0, 100.0) == -0.25
    assert middle([]) is None and middle([3.0, 1.0, 2.0]) == 2.0


def test_every_round_has_every_method_once_in_a_new_order() -> None:
    seen: list[tuple[str, bool]] = []
    rounds: list[tuple[int, int]] = []
    interleave(
        list("abcdef"), 4, lambda e, timed: seen.append((e, timed)), warm_up=2, after_round=lambda *r: rounds.append(r)
    )
    chunks = [seen[i : i + 6] for i in range(0, len(seen), 6)]
    assert len(chunks) == 6 and rounds[-1] == (6, 6)
    assert all(Counter(e for e, _ in chunk) == Counter("abcdef") for chunk in chunks)
    assert [chunk[0][1] for chunk in chunks] == [False, False, True, True, True, True]
    assert len({tuple(e for e, _ in chunk) for chunk in chunks}) > 3


def test_the_order_is_the_same_on_every_rank() -> None:
    assert order_of_round(range(9), 5) == order_of_round(range(9), 5)
    assert order_of_round(range(9), 5) != order_of_round(range(9), 6)


def test_nobody_has_a_favourite_neighbour() -> None:
    before = Counter()
    for number in range(200):
        order = order_of_round(list("abcd"), number)
        before.update(pairwise(order))
    assert len(before) == 12 and max(before.values()) < 2 * min(before.values())


def test_waiting_has_a_deadline() -> None:
    times = iter([0.0, 1.0, 2.0, 31.0])
    with pytest.raises(Stuck, match="a run did not finish within 30 s"):
        wait_until(lambda: False, 30.0, "a run", clock=lambda: next(times))
    wait_until(lambda: True, 0.0, "nothing")


def test_nvidia_smi_is_followed(tmp_path: Path) -> None:
    fake = tmp_path / "smi"
    fake.write_text(
        "#!/bin/sh\necho 'GPU-a, 1700, 650.5'\necho 'GPU-b, 1600, 600.0'\necho 'GPU-c, 300, 900'\nexec sleep 20\n"
    )
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    sampler = clocks.SmiSampler(["GPU-a", "GPU-b"], command=[str(fake)])
    end = time.monotonic() + 10
    while (sampler.read() is None or sampler.read().sm_clock_mhz != 1600.0) and time.monotonic() < end:  # type: ignore[union-attr]
        time.sleep(0.01)
    assert sampler.read() == clocks.Reading(1600.0, 650.5)
    sampler.close()


def test_without_any_source_there_is_no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(clocks.importlib, "import_module", lambda name: (_ for _ in ()).throw(ImportError(name)))
    assert clocks.open_sampler(["GPU-a"]).read() is None


class Clock:
    """Time that passes only in sleep."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


class Event:
    def __init__(self, enable_timing: bool) -> None: ...

    def record(self, stream: None) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return 0.25


def test_a_run_begins_when_the_last_one_is_long_enough_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(sessions, "time", clock)
    watch = sessions.Stopwatch(None)  # type: ignore[arg-type]
    watch.rest()
    assert clock.slept == [0.0], "nothing ran before"
    assert watch.wait_us() == 250.0
    clock.now += sessions.REST_S / 4  # what the session does between two runs
    watch.rest()
    assert clock.slept[1] == pytest.approx(sessions.REST_S * 3 / 4)
    watch.wait_us()
    clock.now += 1.0
    watch.rest()
    assert clock.slept[2] == 0.0
