"""Starts the processes that measure, follows their events, and replaces them when a method takes one down.

The process that asks for the measurements never touches a GPU. A method that hangs, or leaves the GPUs unusable, costs
its worker process; the next one measures the interrupted cell anew, and the cells after it, without that method.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tilerelay.baselines.cell import Cell
from tilerelay.bench.methods import FLOOR, ONE_PROCESS
from tilerelay.bench.records import Record, blank

QUIET_S = 180.0  # without an event for so long, a worker hangs; the longest silence of a healthy one is its start
POLL_S = 0.1
TAIL_LINES = 15

# Multicast over NVLink stays off everywhere: a program that dies while using it can leave a host's links unusable.
ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
# A kernel that spins must not wait for another one's code to be loaded.
ONE_PROCESS_ENVIRONMENT = {"CUDA_MODULE_LOADING": "EAGER"}
# Ranks are on one host, whose name need not resolve.
TORCHRUN_ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


def environment(process_set: str) -> dict[str, str]:
    """The worker finds the package where this process found it, installed or not."""
    root = str(Path(__file__).resolve().parents[2])
    search = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
    own = ONE_PROCESS_ENVIRONMENT if process_set == ONE_PROCESS else TORCHRUN_ENVIRONMENT
    return {**os.environ, **own, **ENVIRONMENT, "PYTHONPATH": search}


@dataclass
class Job:
    """A cell with the methods still to measure on it."""

    cell: Cell
    methods: list[str]
    dropped: dict[str, str] = field(default_factory=dict)  # method -> why it is not measured any more

    def without_dropped(self) -> list[str]:
        return [name for name in self.methods if name not in self.dropped]


@dataclass(frozen=True)
class Watch:
    """What the caller hears: every event, and every finished cell's records."""

    event: Callable[[Cell, dict[str, Any]], None]
    finished: Callable[[Cell, list[Record]], None]
    complain: Callable[[str], None]


Command = Callable[[Path, Path], Sequence[str]]


def command_of(process_set: str, gpus: int) -> Command:
    """(plan, events) -> the command of a process set."""

    def command(plan: Path, events: Path) -> list[str]:
        worker = ["-m", "tilerelay.bench.worker", str(plan), str(events)]
        if process_set == ONE_PROCESS:
            return [sys.executable, *worker]
        # A static rendezvous on the loopback address: needs no resolvable host name.
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        launcher = ["-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={gpus}"]
        return [sys.executable, *launcher, "--master-addr=127.0.0.1", f"--master-port={port}", *worker]

    return command


def measure(
    process_set: str,
    jobs: Sequence[Job],
    *,
    timing: str,
    rounds: int,
    watch: Watch,
    command: Command | None = None,
    quiet_s: float = QUIET_S,
) -> None:
    """Measure jobs that are all on one number of GPUs; `watch.finished` gets every cell, with or without figures."""
    command = command or command_of(process_set, jobs[0].cell.gpus)
    left = list(jobs)
    while left:
        plan = {
            "process_set": process_set,
            "timing": timing,
            "rounds": rounds,
            "jobs": [{"cell": asdict(job.cell), "methods": job.without_dropped()} for job in left],
        }
        done, culprit, reason = _one_worker(plan, left, process_set, timing, watch, command, quiet_s)
        left = left[done:]
        if not left:
            return
        if culprit is None or culprit == FLOOR or culprit in left[0].dropped:
            watch.complain(f"{process_set}: giving up: {reason}")
            for job in left:
                watch.finished(job.cell, _lost(job, job.methods, process_set, timing, f"not measured: {reason}"))
            return
        watch.complain(f"{process_set}: {culprit} ended the process on {left[0].cell} ({reason}); going on without it")
        for job in left:
            if culprit in job.methods:
                job.dropped[culprit] = f"ended its process on {left[0].cell}: {reason}"


def _one_worker(
    plan: dict[str, Any],
    jobs: Sequence[Job],
    process_set: str,
    timing: str,
    watch: Watch,
    command: Command,
    quiet_s: float,
) -> tuple[int, str | None, str]:
    """(jobs finished, method that was running at an early end, why it ended) of one worker process."""
    done, trying, lost = 0, None, None
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        plan_path, events_path, log_path = (Path(folder) / name for name in ("plan.json", "events.jsonl", "log.txt"))
        plan_path.write_text(json.dumps(plan))
        events_path.touch()
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                command(plan_path, events_path),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(process_set),
                start_new_session=True,  # so that it and its ranks can be ended together
            )
        follower = _Follower(process, events_path, quiet_s)
        try:
            for event in follower:
                job = jobs[min(done, len(jobs) - 1)]
                watch.event(job.cell, event)
                if event["event"] == "try":
                    trying = event["method"]
                elif event["event"] == "cell":
                    trying = None
                elif event["event"] == "lost":
                    lost = event["reason"]
                elif event["event"] == "records":
                    records = [Record.from_json(r) for r in event["records"]]
                    records += _lost(job, list(job.dropped), process_set, timing)
                    watch.finished(job.cell, records)
                    done, trying = done + 1, None
        finally:
            _end(process)
        status = process.returncode
        if done < len(jobs):
            tail = log_path.read_text(errors="replace").splitlines()[-TAIL_LINES:]
            watch.complain("\n".join([f"{process_set}: the worker's last lines:", *(f"  | {line}" for line in tail)]))
    how = f"no sign of life for {quiet_s:.0f} s" if follower.silent else f"exit status {status}"
    return done, trying, lost or how


class _Follower:
    """Yields a worker's events until it has ended or has been silent for too long."""

    def __init__(self, process: subprocess.Popen[bytes], path: Path, quiet_s: float) -> None:
        self._process, self._path, self._quiet_s = process, path, quiet_s
        self.silent = False

    def __iter__(self) -> Iterator[dict[str, Any]]:
        last = time.monotonic()
        rest = ""
        with self._path.open() as file:
            while True:
                ended = self._process.poll() is not None  # before reading: what it wrote is then all there
                rest += file.read()
                *lines, rest = rest.split("\n")
                for line in lines:
                    last = time.monotonic()
                    yield json.loads(line)
                if ended:
                    return
                if time.monotonic() - last > self._quiet_s:
                    self.silent = True
                    return
                time.sleep(POLL_S)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a worker and the ranks under it: the process group that was made for it."""
    if process.poll() is None:
        for number, patience_s in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
            try:
                os.killpg(process.pid, number)
                process.wait(timeout=patience_s)
                return
            except ProcessLookupError:
                return
            except subprocess.TimeoutExpired:
                continue


def _lost(job: Job, names: Sequence[str], process_set: str, timing: str, reason: str = "") -> list[Record]:
    return [blank(job.cell, name, process_set, timing, "error", job.dropped.get(name) or reason) for name in names]
