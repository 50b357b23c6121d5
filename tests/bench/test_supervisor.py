"""Workers that die, hang or fall silent: the rest is measured all the same."""

from __future__ import annotations

import sys
from pathlib import Path

from tilerelay.baselines.cell import Cell
from tilerelay.bench import supervisor
from tilerelay.bench.methods import PROCESS_SETS
from tilerelay.bench.records import Record
from tilerelay.bench.supervisor import Job, Watch

FAKE = Path(__file__).with_name("fake_worker.py")
CELLS = [Cell(2, 2, m, 64, 64) for m in (256, 512)]
METHODS = ["floor", "good", "bad", "last"]


class Heard:
    def __init__(self) -> None:
        self.records: dict[tuple[int, str], Record] = {}
        self.complaints: list[str] = []
        self.events: list[str] = []
        self.watch = Watch(lambda c, e: self.events.append(e["event"]), self._finished, self.complaints.append)

    def _finished(self, cell: Cell, records: list[Record]) -> None:
        for record in records:
            assert (cell.m, record.method) not in self.records
            self.records[cell.m, record.method] = record


def measure(trouble: str = "", quiet_s: float = 30.0) -> Heard:
    heard = Heard()
    supervisor.measure(
        "one-process",
        [Job(cell, list(METHODS)) for cell in CELLS],
        timing="graph",
        rounds=3,
        watch=heard.watch,
        command=lambda plan, events: [sys.executable, str(FAKE), str(plan), str(events), trouble],
        quiet_s=quiet_s,
    )
    assert set(heard.records) == {(c.m, name) for c in CELLS for name in METHODS}
    return heard


def test_all_is_well() -> None:
    heard = measure()
    assert all(r.status == "ok" for r in heard.records.values()) and heard.complaints == []
    assert heard.events.count("records") == 2 and heard.events[-1] == "end"


def check_only_bad_failed(heard: Heard, reason: str) -> None:
    for (_, name), record in heard.records.items():
        assert record.status == ("error" if name == "bad" else "ok")
        if name == "bad":
            assert reason in str(record.reason) and "M=256" in str(record.reason)


def test_a_method_that_kills_the_process_is_left_out_from_then_on() -> None:
    heard = measure("bad=crash")
    check_only_bad_failed(heard, "exit status 9")
    assert any("fatal: bad" in line for line in heard.complaints)  # the worker's last words


def test_a_method_that_hangs() -> None:
    check_only_bad_failed(measure("bad=hang"), "did not finish within 30 s")


def test_a_method_that_falls_silent_is_ended() -> None:
    check_only_bad_failed(measure("bad=silent", quiet_s=2.0), "no sign of life for 2 s")


def test_without_a_floor_nothing_can_be_compared() -> None:
    heard = measure("floor=crash")
    assert all(r.status == "error" and "not measured" in str(r.reason) for r in heard.records.values())


def test_a_worker_that_never_starts() -> None:
    heard = measure("start=crash")
    assert all(r.status == "error" and "exit status 7" in str(r.reason) for r in heard.records.values())
    assert any("no GPU answers" in line for line in heard.complaints)


def test_commands() -> None:
    plan, events = Path("plan.json"), Path("events.jsonl")
    one = supervisor.command_of("one-process", 2)(plan, events)
    assert one == [sys.executable, "-m", "tilerelay.bench.worker", "plan.json", "events.jsonl"]
    ranks = supervisor.command_of("torchrun", 4)(plan, events)
    assert "--nproc-per-node=4" in ranks and "--master-addr=127.0.0.1" in ranks and ranks[-4:] == one[-4:]


def test_multicast_is_off_in_every_worker() -> None:
    for process_set in PROCESS_SETS:
        environment = supervisor.environment(process_set)
        assert environment["NCCL_NVLS_ENABLE"] == "0"
        assert environment["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
