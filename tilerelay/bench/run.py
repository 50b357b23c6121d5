"""One run of the bench: what is asked for, what is there already, what is skipped, and the file that it ends in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from tilerelay.baselines.cell import Cell
from tilerelay.bench import methods, paper, results, suites, supervisor
from tilerelay.bench.progress import Progress, progress
from tilerelay.bench.records import TIMINGS, CellKey, Record
from tilerelay.bench.results import Results
from tilerelay.bench.supervisor import Job, Watch
from tilerelay.errors import InvalidInput

MOST_ROUNDS = 1000
DEFAULT_ROUNDS = 12


@dataclass(frozen=True)
class Request:
    """What the caller wants. Checked on construction.

    Raises:
        InvalidInput: unknown names or sizes.
    """

    suite: str = "quick"
    gpus: tuple[int, ...] = ()
    ms: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    rounds: int = DEFAULT_ROUNDS
    timing: str = "graph"
    out: Path | None = None

    def __post_init__(self) -> None:
        suites.cells_of(self.suite, self.gpus, self.ms)
        methods.choose(self.names)
        if not 1 <= self.rounds <= MOST_ROUNDS:
            raise InvalidInput(f"rounds={self.rounds}: give 1 to {MOST_ROUNDS}")
        if self.timing not in TIMINGS:
            raise InvalidInput(f"unknown timing {self.timing!r}; choose one of {', '.join(TIMINGS)}")


@dataclass
class Plan:
    """What is to do, as jobs by process set, and what is left out, as lines for the reader."""

    jobs: dict[str, list[Job]] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)

    @property
    def cells(self) -> int:
        return sum(len(jobs) for jobs in self.jobs.values())


def make_plan(request: Request, gpus: int, have: Results) -> Plan:
    """Leaves out cells that need more than `gpus` GPUs and cells that are measured already."""
    plan = Plan()
    chosen = methods.choose(request.names)
    cells = []
    for cell in suites.cells_of(request.suite, request.gpus, request.ms):
        if cell.gpus > gpus:
            plan.skipped.append(f"skipped {cell}: this machine has {gpus} GPU{'' if gpus == 1 else 's'}")
        else:
            cells.append(cell)
    for process_set, names in chosen.items():
        for cell in cells:
            if process_set == methods.TORCHRUN and cell.gpus == 1:
                continue  # nothing to communicate; the one-process set has the cell
            measured = have.measured(CellKey(cell, process_set, request.timing))
            if set(names) <= measured:
                plan.skipped.append(f"already measured: {cell}, {process_set}")
                continue
            # A cell is measured as a whole: what it has is measured again beside what it lacks.
            whole = [n for n in methods.PROCESS_SETS[process_set] if n in measured or n in names]
            plan.jobs.setdefault(process_set, []).append(Job(cell, whole))
    return plan


def label(record: Record) -> Record:
    """A record with its suites and the paper's figures for its cell."""
    record.suite = suites.suites_of(record.cell)
    record.paper_us = paper.paper_us(record.cell, record.method)
    record.paper_reduction = paper.paper_reduction(record.cell, record.method)
    return record


def run(
    request: Request,
    machine: dict[str, Any],
    *,
    say: Callable[[str], None],
    command_of: Callable[[str, int], supervisor.Command] = supervisor.command_of,
) -> tuple[Results, list[Record]]:
    """Measure what is asked for and not there yet; the file is written after every cell.

    Args:
        machine: `tilerelay.bench.machine.facts`.
        say: gets a line for everything that is left out.

    Returns:
        All results, and the records of the cells that were asked for.

    Raises:
        InvalidInput: the results file is bad or from elsewhere.
    """
    have = results.resume(request.out, machine)
    plan = make_plan(request, machine["gpus"], have)
    for line in plan.skipped:
        say(line)
    with progress(plan.cells) as shown:
        for process_set, jobs in plan.jobs.items():
            for gpus, of_one_size in groupby(
                sorted(jobs, key=lambda job: job.cell.gpus), key=lambda job: job.cell.gpus
            ):
                supervisor.measure(
                    process_set,
                    list(of_one_size),
                    timing=request.timing,
                    rounds=request.rounds,
                    watch=_watch(have, process_set, request, shown),
                    command=command_of(process_set, gpus),
                )
    asked = set(suites.cells_of(request.suite, request.gpus, request.ms))
    return have, [r for r in have.records if r.cell in asked and r.timing == request.timing]


def _watch(have: Results, process_set: str, request: Request, shown: Progress) -> Watch:
    def finished(cell: Cell, records: Sequence[Record]) -> None:
        have.put(CellKey(cell, process_set, request.timing), [label(record) for record in records])
        if request.out is not None:
            results.save(have, request.out)
        shown.finished(cell)
        for record in records:
            if record.status == "error":
                shown.say(f"failed: {record.method} ({process_set}) on {cell}: {record.reason}")
            elif record.status == "ok" and record.reason:
                shown.say(f"partly failed: {record.method} ({process_set}) on {cell}: {record.reason}")

    return Watch(event=shown.event, finished=finished, complain=shown.say)
