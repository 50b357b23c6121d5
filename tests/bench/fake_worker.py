"""A worker without GPUs: follows the plan, makes figures up, and misbehaves as its third argument says.

METHOD=crash|hang|silent: on that method it dies, reports a hang, or says nothing more. `start=crash`: dies at once.
"""

from __future__ import annotations

import json
import os
import sys
import time


def main(plan_path: str, events_path: str, trouble: str = "") -> None:
    with open(plan_path) as file:
        plan = json.load(file)
    method_in_trouble, _, kind = trouble.partition("=")

    def emit(**event: object) -> None:
        with open(events_path, "a") as file:
            file.write(json.dumps(event) + "\n")

    if method_in_trouble == "start":
        print("no GPU answers", file=sys.stderr)
        sys.exit(7)
    for index, job in enumerate(plan["jobs"]):
        emit(event="cell", job=index)
        records = []
        for number, name in enumerate(job["methods"]):
            emit(event="try", method=name, variant="v")
            if name == method_in_trouble:
                if kind == "hang":
                    emit(event="lost", reason="a run did not finish within 30 s")
                    os._exit(3)
                if kind == "silent":
                    time.sleep(60)
                print(f"fatal: {name}", file=sys.stderr)
                os._exit(9)
            from tilerelay.baselines.cell import Cell
            from tilerelay.bench.records import blank

            record = blank(Cell(**job["cell"]), name, plan["process_set"], plan["timing"], "ok")
            record.median_us = record.min_us = record.max_us = 100.0 + number
            record.ratio_to_floor = 1.0 + number / 100
            records.append(record.to_json())
        emit(event="round", done=1, of=1)
        emit(event="records", job=index, records=records)
    emit(event="end")


if __name__ == "__main__":
    main(*sys.argv[1:])
