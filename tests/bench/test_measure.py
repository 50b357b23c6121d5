"""Measuring a cell with made-up methods: order, failures that stay alone, and what a record says."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from tilerelay.baselines.cell import Cell
from tilerelay.baselines.deadline import Stuck
from tilerelay.baselines.method import Lives
from tilerelay.bench.clocks import Reading
from tilerelay.bench.measure import ContextLost, Timed, measure_cell
from tilerelay.bench.records import Record
from tilerelay.bench.rounds import WARM_UP_ROUNDS

CELL = Cell(2, 2, 1024, 64, 64)


@dataclass
class FakeVariant:
    label: str
    us: float
    chunk: int | None = None
    compute_only: bool = False
    checked: bool = True
    note: str | None = None
    fails_at: str = ""
    error: BaseException = field(default_factory=lambda: RuntimeError("boom\nand more"))
    wrong_by: float = 0.001


@dataclass
class FakeMethod:
    name: str
    made: list[FakeVariant]
    why_not: str | None = None
    lives: Lives = field(default_factory=lambda: Lives("here", "there"))

    def refusal(self, cell: Cell) -> str | None:
        return self.why_not


class FakeLaunch:
    def __init__(self, variant: FakeVariant) -> None:
        self.variant, self.closed, self.runs = variant, False, 0

    def close(self) -> None:
        self.closed = True


class FakeSession:
    process_set, timing, tolerance = "one-process", "graph", 0.01

    def __init__(self, *methods: FakeMethod, broken: bool = False) -> None:
        self.methods = {m.name: m for m in methods}
        self.order: list[str] = []
        self.launches: list[FakeLaunch] = []
        self.broken, self.ended = broken, 0

    def method(self, name: str) -> FakeMethod:
        return self.methods[name]

    def variants(self, method: FakeMethod, cell: Cell) -> list[FakeVariant]:
        return method.made

    def _maybe_fail(self, variant: FakeVariant, step: str) -> None:
        if variant.fails_at == step:
            raise variant.error

    def launch(self, variant: FakeVariant) -> FakeLaunch:
        self._maybe_fail(variant, "launch")
        self.launches.append(FakeLaunch(variant))
        return self.launches[-1]

    def check(self, variant: FakeVariant, launch: FakeLaunch, cell: Cell) -> float:
        self._maybe_fail(variant, "check")
        return variant.wrong_by

    def time(self, launch: FakeLaunch) -> Timed:
        self.order.append(launch.variant.label)
        launch.runs += 1
        if launch.runs > 5:
            self._maybe_fail(launch.variant, "time")
        return Timed(launch.variant.us + launch.runs / 100, Reading(1500.0 + launch.runs, 600.0))

    def agree(self, failure: str | None) -> str | None:
        return failure

    def healthy(self) -> bool:
        return not self.broken

    def end_cell(self) -> None:
        self.ended += 1


def floor() -> FakeMethod:
    return FakeMethod("floor", [FakeVariant("cut a", 120.0, checked=False), FakeVariant("cut b", 100.0, checked=False)])


def measured(session: FakeSession, **options: Any) -> dict[str, Record]:
    events: list[dict[str, Any]] = []
    records = measure_cell(session, CELL, list(session.methods), rounds=10, emit=events.append)
    for record in records:
        Record.from_json(record.to_json())  # what is written can be read
    return {r.method: r for r in records}


def test_the_best_variant_counts_and_the_sweep_is_kept() -> None:
    mb = FakeMethod("mb", [FakeVariant("chunks of 256", 180.0, 256), FakeVariant("chunks of 512", 150.0, 512)])
    session = FakeSession(floor(), mb)
    records = measured(session)
    assert records["floor"].variant == "cut b" and records["floor"].ratio_to_floor == 1.0
    record = records["mb"]
    assert (record.status, record.chunk, record.variant) == ("ok", 512, "chunks of 512")
    assert record.ratio_to_floor == pytest.approx(1.5, rel=0.01)
    assert [s["chunk"] for s in record.sweep] == [256, 512]
    assert record.sweep[0]["median_us"] > record.sweep[1]["median_us"] == record.median_us
    assert record.min_us < record.median_us < record.max_us  # type: ignore[operator]
    assert (record.rounds, record.check_error) == (10, 0.001)
    assert record.sm_clock_mhz is not None and 1500 < record.sm_clock_mhz < 1520 and record.power_w == 600.0
    assert (record.x_lives, record.y_lives) == ("here", "there")
    assert all(launch.closed for launch in session.launches) and session.ended == 1


def test_rounds_interleave_all_variants_of_all_methods() -> None:
    session = FakeSession(floor(), FakeMethod("a", [FakeVariant("x", 1.0)]), FakeMethod("b", [FakeVariant("y", 1.0)]))
    measured(session)
    size = 4
    chunks = [session.order[i : i + size] for i in range(0, len(session.order), size)]
    assert len(chunks) == WARM_UP_ROUNDS + 10
    assert all(sorted(chunk) == ["cut a", "cut b", "x", "y"] for chunk in chunks)


def test_the_part_without_communication_is_never_the_latency() -> None:
    whole, part = FakeVariant("whole batch", 140.0), FakeVariant("without all-reduce", 105.0, compute_only=True)
    record = measured(FakeSession(floor(), FakeMethod("tp-nccl", [whole, part])))["tp-nccl"]
    assert record.variant == "whole batch"
    assert record.compute_us is not None and 105 < record.compute_us < 106


@pytest.mark.parametrize("step", ["launch", "check", "time"])
def test_one_failure_leaves_the_others_alone(step: str) -> None:
    bad = FakeMethod("bad", [FakeVariant("v", 1.0, fails_at=step)])
    session = FakeSession(floor(), bad, FakeMethod("good", [FakeVariant("w", 110.0)]))
    records = measured(session)
    assert records["bad"].status == "error" and "RuntimeError: boom and more" in str(records["bad"].reason)
    assert records["bad"].median_us is None and records["bad"].ratio_to_floor is None
    assert records["good"].status == "ok" and records["floor"].status == "ok"
    assert all(launch.closed for launch in session.launches)
    if step == "time":
        assert session.order.count("v") == 6  # it is left out from then on


def test_a_failed_variant_shows_on_a_method_that_has_others() -> None:
    method = FakeMethod("mb", [FakeVariant("small", 1.0, fails_at="launch"), FakeVariant("large", 110.0)])
    record = measured(FakeSession(floor(), method))["mb"]
    assert record.status == "ok" and record.variant == "large" and "small: RuntimeError" in str(record.reason)


@pytest.mark.parametrize("wrong", [0.5, float("nan")])
def test_a_wrong_result_is_a_failure(wrong: float) -> None:
    method = FakeMethod("fast", [FakeVariant("v", 1.0, wrong_by=wrong)])
    record = measured(FakeSession(floor(), method))["fast"]
    assert record.status == "error" and "wrong result" in str(record.reason)


def test_what_makes_no_sense_is_skipped_with_its_reason() -> None:
    record = measured(FakeSession(floor(), FakeMethod("tp", [], "needs two GPUs or more")))["tp"]
    assert (record.status, record.reason) == ("skipped", "needs two GPUs or more")


def test_a_lost_context_ends_the_cell() -> None:
    session = FakeSession(floor(), FakeMethod("bad", [FakeVariant("v", 1.0, fails_at="launch")]), broken=True)
    with pytest.raises(ContextLost, match="boom") as caught:
        measured(session)
    assert caught.value.method == "bad"


def test_a_hang_is_not_taken_for_a_failure() -> None:
    variant = FakeVariant("v", 1.0, fails_at="time", error=Stuck("a run did not finish"))
    with pytest.raises(Stuck):
        measured(FakeSession(floor(), FakeMethod("hangs", [variant])))


def test_another_ranks_failure_counts_here_too() -> None:
    session = FakeSession(floor(), FakeMethod("a", [FakeVariant("v", 1.0)]))
    answers = iter([None] * 4 + ["rank 1: OutOfMemoryError"])
    session.agree = lambda failure: failure or next(answers, None)  # type: ignore[method-assign]
    record = measured(session)["a"]
    assert record.status == "error" and record.reason == "v: rank 1: OutOfMemoryError"


def test_without_a_floor_there_is_no_ratio() -> None:
    broken = FakeMethod("floor", [FakeVariant("cut", 1.0, checked=False, fails_at="launch")])
    records = measured(FakeSession(broken, FakeMethod("a", [FakeVariant("v", 1.0)])))
    assert records["floor"].status == "error" and records["a"].ratio_to_floor is None
