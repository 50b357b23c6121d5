"""The process that measures: `python -m tilerelay.bench.worker plan.json events.jsonl`, alone or under torchrun.

The plan: {"process_set", "timing", "rounds", "jobs": [{"cell": {...}, "methods": [...]}, ...]}, all cells on one number
of GPUs. Events go to a file, one JSON object a line, so that whatever libraries print cannot get in between. The
process that started this one reads them; when this one dies, the last "try" says what it was doing.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import IO, Any

from tilerelay.baselines.cell import Cell
from tilerelay.baselines.deadline import Stuck
from tilerelay.bench.measure import ContextLost, measure_cell
from tilerelay.bench.methods import ONE_PROCESS

LOST = 3  # exit status: the GPUs do not answer any more, or never came to an end


class Events:
    """Appends to the events file; silent on all ranks but the first."""

    def __init__(self, path: Path) -> None:
        self._file: IO[str] | None = path.open("a", buffering=1) if os.environ.get("RANK", "0") == "0" else None

    def emit(self, event: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(event, allow_nan=False) + "\n")


def open_session(process_set: str, cells: list[Cell], timing: str) -> Any:
    if process_set == ONE_PROCESS:
        from tilerelay.bench.one_process import OneProcess

        return OneProcess(cells, timing)
    from tilerelay.bench.ranks import Ranks

    return Ranks(cells, timing)


def work(plan: dict[str, Any], events: Events) -> None:
    """Measure all jobs of a plan.

    Raises:
        ContextLost, Stuck: the process must end.
    """
    cells = [Cell(**job["cell"]) for job in plan["jobs"]]
    session = open_session(plan["process_set"], cells, plan["timing"])
    for index, (cell, job) in enumerate(zip(cells, plan["jobs"], strict=True)):
        events.emit({"event": "cell", "job": index})
        records = measure_cell(session, cell, job["methods"], rounds=plan["rounds"], emit=events.emit)
        events.emit({"event": "records", "job": index, "records": [r.to_json() for r in records]})
    session.close()
    events.emit({"event": "end"})


def main(arguments: list[str]) -> None:
    plan_path, events_path = arguments
    events = Events(Path(events_path))
    try:
        work(json.loads(Path(plan_path).read_text()), events)
    except (ContextLost, Stuck) as error:
        events.emit({"event": "lost", "reason": str(error)})
        print(f"worker: {error}", file=sys.stderr, flush=True)
        os._exit(LOST)  # an orderly exit would wait for the GPU
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # graphs and communicators are alive: their destructors' order is not ours to choose


if __name__ == "__main__":
    main(sys.argv[1:])
