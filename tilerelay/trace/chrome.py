"""A trace as a Chrome trace (Trace Event Format, JSON object form), which the Perfetto UI opens; and back.

A device is a process, a worker's role a thread, a phase of a tile a complete event ("X"); arrows ("s", "f") follow the
critical path. The event table itself stands beside the events, under "tilerelay", where viewers leave it alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from tilerelay.errors import InvalidInput
from tilerelay.trace.events import DEVICE, STAGE, TILE, WORKER, Trace
from tilerelay.trace.files import from_values, to_values
from tilerelay.trace.path import ARRIVAL, critical_path
from tilerelay.trace.spans import WHOLE, spans

OURS = "tilerelay"
# To Perfetto, process 0 is special, and a thread numbered like its process is the process's main thread, into which it
# also puts a thread 0. So processes count from 1, and threads from a number that no process has.
_FIRST_PROCESS = 1
_FIRST_THREAD = 1000
_ROLE_OFFSETS = {WHOLE: 0, "load": 0, "math": 1, "store": 2}
_THREADS_PER_WORKER = 3


def to_chrome(trace: Trace) -> dict[str, Any]:
    """The JSON object; `ts` and `dur` in microseconds, a scheduler's step counting as one."""
    return {
        "displayTimeUnit": "ns",
        "traceEvents": [*_names(trace), *_phases(trace), *_arrows(trace)],
        "otherData": {"clock": trace.clock.source, "clock error": f"{trace.clock.error:g} {trace.clock.unit}"},
        OURS: to_values(trace),
    }


def write(trace: Trace, path: Path) -> None:
    """Write the trace to a file.

    Raises:
        InvalidInput: it cannot be written.
    """
    try:
        path.write_text(json.dumps(to_chrome(trace), separators=(",", ":")) + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"{path}: cannot be written ({error.strerror})") from None


def read(path: Path) -> Trace:
    """The trace in a file that `write` wrote.

    Raises:
        InvalidInput: it cannot be read, is cut off, or is some other program's.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInput(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise InvalidInput(f"{path}: not a JSON file") from None
    except (json.JSONDecodeError, RecursionError) as error:
        where = f" (at byte {error.pos})" if isinstance(error, json.JSONDecodeError) else ""
        raise InvalidInput(f"{path}: not JSON, or cut off{where}; write the trace again") from None
    if not isinstance(values, dict) or OURS not in values:
        raise InvalidInput(f"{path}: not a trace of tilerelay; `tilerelay trace run --out FILE` writes one")
    try:
        return from_values(values[OURS])
    except InvalidInput as error:
        raise InvalidInput(f"{path}: {error}") from None


def _us(trace: Trace, time: int) -> float:
    return time / 1e3 if trace.clock.unit == "ns" else float(time)


def _process(device: int) -> int:
    return _FIRST_PROCESS + device


def _thread(worker: int, role: str) -> int:
    return _FIRST_THREAD + worker * _THREADS_PER_WORKER + _ROLE_OFFSETS[role]


def _names(trace: Trace) -> Iterator[dict[str, Any]]:
    """Metadata events: what processes and threads are called, and their order."""
    for device in trace.devices:
        process = _process(device)
        yield _meta("process_name", process, process, name=trace.device_name(device))
        yield _meta("process_sort_index", process, process, sort_index=device)
    for (device, worker), walk in trace.walks.items():
        stages = sorted({int(trace.keys[record, STAGE]) for record in walk})
        overlap = any(trace.roles_overlap[record] for record in walk)
        for role in ("load", "math", "store") if overlap else (WHOLE,):
            thread = _thread(worker, role)
            names = "+".join(trace.stages[stage].name for stage in stages)
            yield _meta("thread_name", _process(device), thread, name=f"{names} worker {worker}" + f" {role}" * overlap)
            yield _meta("thread_sort_index", _process(device), thread, sort_index=thread)


def _meta(kind: str, process: int, thread: int, **args: object) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "ts": 0, "args": args}


def _phases(trace: Trace) -> Iterator[dict[str, Any]]:
    for (device, worker), role, found in spans(trace):
        for span in found:
            stage, tile = (int(n) for n in trace.keys[span.record, [STAGE, TILE]])
            yield {
                "ph": "X", "name": span.phase, "cat": trace.stages[stage].name, "pid": _process(device),
                "tid": _thread(worker, role), "ts": _us(trace, span.begin), "dur": _us(trace, span.end - span.begin),
                "args": {"tile": tile},
            }  # fmt: skip


def _arrows(trace: Trace) -> Iterator[dict[str, Any]]:
    """From a tile on the critical path to the next one: it begins in the one's last phase, ends in the other's first.

    An arrow binds to the slice that encloses its time on its thread, so it is drawn from within a slice to within one.
    """
    ends: dict[int, list[tuple[int, int, str]]] = {}
    for _, busy, found in spans(trace):
        for span in found:
            ends.setdefault(span.record, []).append((span.begin, span.end, busy))
    steps = critical_path(trace)
    for number, (a, b) in enumerate(pairwise(steps)):
        if a.record not in ends or b.record not in ends:
            continue
        roles = ("store", WHOLE) if b.bound == ARRIVAL else ("math", WHOLE)
        tail = max((s for s in ends[a.record] if s[2] in roles), default=max(ends[a.record]))
        head = min((s for s in ends[b.record] if s[1] > a.end), default=max(ends[b.record]))
        for phase, record, role, time in (
            ("s", a.record, tail[2], tail[0]),
            ("f", b.record, head[2], max(head[0], min(head[1] - 1, tail[0]))),
        ):
            device, worker = (int(n) for n in trace.keys[record, [DEVICE, WORKER]])
            event = {
                "ph": phase, "id": number, "name": "critical path", "cat": "critical path", "pid": _process(device),
                "tid": _thread(worker, role), "ts": _us(trace, time),
            }  # fmt: skip
            yield {**event, "bp": "e"} if phase == "f" else event
