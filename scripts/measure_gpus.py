"""Measures everything there is to measure on four or eight GPUs: tests, the bench's cells, contention at a third GPU.

    PYTHONPATH=. python3 scripts/measure_gpus.py 4 --commit $(git rev-parse --short HEAD) --out results-4

Every step is a process with a time limit and a log in the folder; one that fails keeps none of the others from running.
A second run goes on with the bench's results file. The summary puts the targets beside what was measured.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from tilerelay.baselines.cell import Cell
from tilerelay.bench import methods, paper, results
from tilerelay.bench.records import Record
from tilerelay.errors import InvalidInput

ROOT = Path(__file__).resolve().parent.parent
RESULTS = "bench.json"
# Ctrl-C first: the bench ends its workers then, and pytest says what passed. The bench needs up to 20 s for it.
ENDINGS = ((signal.SIGINT, 40.0), (signal.SIGKILL, 20.0))


@dataclass(frozen=True)
class Step:
    """A command, how long it may take, and what its log must say (a regular expression) beyond its exit status."""

    name: str
    command: Sequence[str]
    limit_s: float
    must_say: str = ""


@dataclass(frozen=True)
class Target:
    """The least ratio of some methods to the floor, or to the best of those in `against`, is to be at most `most`."""

    cell: Cell
    methods: tuple[str, ...]
    most: float
    against: tuple[str, ...] = ()
    note: str = ""


OURS = (methods.OURS, "sharded", "sharded-replicated", "hybrid-tp")
BASELINES = tuple(name for name in methods.NAMES if name not in (*OURS, methods.FLOOR))
PAPER_EIGHT = paper.TABLE_1[8][1] / paper.TABLE_1[1][1]


def square(gpus: int, layers: int, m: int) -> Cell:
    return Cell(gpus, layers, m, paper.WIDTH, paper.WIDTH)


TARGETS = (
    *(
        Target(square(4, layers, m), ("sharded",), most)
        for layers in (4, 2)
        for m, most in ((1024, 1.15), (4096, 1.06), (8192, 1.06), (16384, 1.06), (32768, 1.06))
    ),
    Target(square(4, 4, 16384), (methods.OURS,), 1.15),
    Target(square(8, 8, 16384), (methods.OURS,), 1.30, note=f"the paper's on B200 against one GPU: {PAPER_EIGHT:.2f}"),
    Target(square(8, 2, 4096), OURS, 0.80, against=BASELINES),
)


def steps_of(gpus: int, commit: str, out: Path) -> list[Step]:
    """What is to be done on so many GPUs, short things first."""
    python, bench = sys.executable, ["-m", "tilerelay", "bench", "--suite", "all", "--gpus", str(gpus)]
    third = [python, "scripts/measure_third_gpu.py", "--commit", commit, "--out", str(out / "third-gpu.json")]
    return [
        # pytest calls it a success when every test was skipped.
        Step("tests", [python, "-m", "pytest", "-m", "gpu", "tests/gpu"], 1800, must_say=r"\b[1-9]\d* passed"),
        *([Step("third-gpu", third, 300)] if gpus == 4 else []),
        Step("bench", [python, *bench, "--commit", commit, "--out", str(out / RESULTS)], 5400),
    ]


def run_step(step: Step, out: Path, endings: Sequence[tuple[int, float]] = ENDINGS) -> str:
    """Run a step to its end or its limit; "" when all went well, else what went wrong."""
    log = out / f"{step.name}.log"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.getenv("PYTHONPATH")])])}
    with log.open("wb") as file:
        try:
            process = subprocess.Popen(
                step.command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=file,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            return f"did not start ({error.strerror})"
        try:
            status = process.wait(step.limit_s)
        except subprocess.TimeoutExpired:
            return f"ended at its limit of {step.limit_s:g} s"
        finally:
            _end(process, endings)
    if status:
        return f"exit status {status}"
    if step.must_say and not re.search(step.must_say, log.read_text(errors="replace")):
        return "nothing passed"
    return ""


def _end(process: subprocess.Popen[bytes], endings: Sequence[tuple[int, float]]) -> None:
    """End the group that was made for a step that still runs."""
    for number, patience_s in endings:
        if process.poll() is None:
            os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(patience_s)


def run_steps(steps: Iterable[Step], out: Path) -> tuple[list[str], bool]:
    """A line per step, and whether one failed."""
    lines, failed = [], False
    for step in steps:
        print(f"{step.name}: at most {step.limit_s:g} s, log in {out / step.name}.log", flush=True)
        began = time.monotonic()
        trouble = run_step(step, out)
        failed |= bool(trouble)
        took = time.monotonic() - began
        lines.append(f"{step.name}: {f'FAILED: {trouble}' if trouble else 'ok'} ({took:.0f} s)")
        print(lines[-1], flush=True)
    return lines, failed


def least(records: Iterable[Record], cell: Cell, names: Sequence[str]) -> tuple[float, str] | None:
    """The least ratio to the floor, and whose it is. Ratios alone compare across process sets."""
    ratios = [
        (r.ratio_to_floor, r.method)
        for r in records
        if (r.cell, r.timing, r.status) == (cell, "graph", "ok") and r.method in names and r.ratio_to_floor is not None
    ]
    return min(ratios, default=None)


def judge(target: Target, records: Sequence[Record]) -> str:
    """A line: the cell, the measured ratio, the target, and whether it was met."""
    ours, other = least(records, target.cell, target.methods), None
    name = ours[1] if ours else target.methods[0] if len(target.methods) == 1 else "the best placement"
    base, ratio = "the floor", ours[0] if ours else None
    if target.against:
        other = least(records, target.cell, target.against)
        base = f"the best baseline ({other[1]})" if other else "the best baseline"
        ratio = ours[0] / other[0] if ours and other else None
    measured = "not measured" if ratio is None else f"{ratio:.3f} of {base}"
    verdict = "" if ratio is None else ": met" if ratio <= target.most else ": MISSED"
    note = f" ({target.note})" if target.note else ""
    return f"{target.cell}: {name}: {measured}, target at most {target.most:.2f} of {base}{note}{verdict}"


def target_lines(gpus: int, path: Path, targets: Sequence[Target] = TARGETS) -> list[str]:
    try:
        records = results.load(path).records
    except InvalidInput as error:
        return [f"no targets compared: {error}"]
    return [judge(target, records) for target in targets if target.cell.gpus == gpus]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gpus", type=int, choices=(4, 8))
    parser.add_argument("--commit", required=True, help="the commit that is measured")
    parser.add_argument("--out", type=Path, required=True, help="folder for results and logs")
    parser.add_argument("--steps", default="", help="only these: tests,third-gpu,bench")
    given = parser.parse_args(arguments)
    out = given.out.resolve()
    steps = steps_of(given.gpus, given.commit, out)
    wanted = [name for name in given.steps.split(",") if name] or [step.name for step in steps]
    if unknown := set(wanted) - {step.name for step in steps}:
        parser.error(f"--steps: {', '.join(sorted(unknown))}: none of {', '.join(step.name for step in steps)}")
    count = torch.cuda.device_count()
    if count < given.gpus:
        print(f"measure_gpus: needs {given.gpus} GPUs, this machine has {count}", file=sys.stderr)
        return 2
    out.mkdir(parents=True, exist_ok=True)
    for number in (signal.SIGINT, signal.SIGTERM):  # either ends the step that runs, too; neither is ignored there
        signal.signal(number, signal.default_int_handler)
    lines, failed = run_steps([step for step in steps if step.name in wanted], out)
    summary = "\n".join([*lines, *target_lines(given.gpus, out / RESULTS)])
    (out / "summary.txt").write_text(summary + "\n")
    print(f"\n{summary}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
