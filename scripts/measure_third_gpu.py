"""Measures what a pipelined pair of GPUs and copies between its consumer and a third GPU cost each other.

    PYTHONPATH=. python3 scripts/measure_third_gpu.py --commit $(git rev-parse --short HEAD) --out third-gpu.json

The paper (V.C) expects contention: the tiles that GPU 0 writes into GPU 1's memory and GPU 1's traffic with GPU 2 share
GPU 1's links to the switch. Four works are timed, each alone and while another one runs without a pause: the pair on
GPUs 0 and 1, the copy engine's 1 -> 2 and 2 -> 1, and, to tell links from memory and power, the pair's two GEMMs
without communication. A copy 0 -> 1 at full rate shows what a full link does. All are interleaved round by round.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")

import torch

from tilerelay import Pipeline, TilerelayError, dense_chain, pipelined
from tilerelay.bench.machine import facts
from tilerelay.bench.rounds import interleave
from tilerelay.runtime.cuda import Fork, check_machine, on, open_peers

DEVICES = (0, 1, 2)
WIDTH, ROWS = 8192, (4096, 16384)
COPY_BYTES, ROUNDS = 512 * 2**20, 15
PIPELINE, GEMMS, OUT, IN, FULL = "pipeline 0->1", "gemms", "copy 1->2", "copy 2->1", "copy 0->1"
Record = dict[str, Any]
Case = tuple[str, str]  # what is timed, and what runs beside it, if anything
CASES: list[Case] = [(copy, beside) for copy in (OUT, IN) for beside in ("", PIPELINE, GEMMS, FULL)] + [
    (work, beside) for work in (PIPELINE, GEMMS) for beside in ("", OUT, IN)
]
SLOWEST = 3  # what runs beside a work goes on for at least this many times as long as the work takes alone


class Work(NamedTuple):
    """Something to enqueue on a stream, and the bytes that it sends over a link."""

    stream: torch.cuda.Stream
    enqueue: Callable[[], object]
    bytes: int


class Timed(NamedTuple):
    """A work's time in one round, and whether what ran beside it outlasted it."""

    us: float
    covered: bool


def synchronize() -> None:
    list(map(torch.cuda.synchronize, DEVICES))


def copy_work(source: int, target: int) -> Work:
    """The copy engine's, on streams of its own: on a current stream it would be ordered with the pipeline's runs."""
    here = torch.ones(COPY_BYTES, dtype=torch.uint8, device=f"cuda:{source}")
    there = torch.empty(COPY_BYTES, dtype=torch.uint8, device=f"cuda:{target}")
    stream, arrival = torch.cuda.Stream(source), torch.cuda.Stream(target)

    def enqueue() -> None:
        with on(arrival), on(stream):
            there.copy_(here, non_blocking=True)

    return Work(stream, enqueue, COPY_BYTES)


class Bench:
    """Operands of the largest batch, and the works of one batch size."""

    def __init__(self) -> None:
        check_machine(DEVICES)
        open_peers(DEVICES)
        torch.manual_seed(0)
        self.streams = [torch.cuda.Stream(device) for device in (0, 1)]
        self.x = [torch.randn(max(ROWS), WIDTH, device=f"cuda:{d}").bfloat16() for d in (0, 1)]
        self.weights = [(torch.randn(WIDTH, WIDTH, device=f"cuda:{d}") / WIDTH**0.5).bfloat16() for d in (0, 1)]
        self.y = [torch.empty_like(x) for x in self.x]
        self.copies = {OUT: copy_work(1, 2), IN: copy_work(2, 1), FULL: copy_work(0, 1)}
        synchronize()  # what follows runs on other streams

    def gemms(self, m: int) -> Work:
        """The pair's FLOPs with cuBLAS, both GPUs at once, nothing over a link."""
        home = self.streams[0]
        fork = Fork(self.streams[1:], 0)

        def enqueue() -> None:
            fork.fork(home)
            for device, stream in enumerate(self.streams):
                with on(stream):
                    torch.mm(self.x[device][:m], self.weights[device].T, out=self.y[device][:m])
            fork.join(home)

        return Work(home, enqueue, 0)

    def measure(self, m: int) -> list[Record]:
        x = self.x[0][:m]
        with Pipeline(dense_chain(m, [WIDTH] * 3), self.weights, placement=pipelined([0, 1])) as pipe:
            works = {**self.copies, GEMMS: self.gemms(m)}
            works[PIPELINE] = Work(self.streams[0], pipe.capture(x).replay, m * WIDTH * 2)
            alone = {name: min(timed(work).us for _ in range(3)) for name, work in works.items()}
            times: dict[Case, list[Timed]] = {case: [] for case in CASES}

            def once(case: Case, count: bool) -> None:
                work, beside = case
                repeats = math.ceil(SLOWEST * alone[work] / alone[beside]) + 1 if beside else 0
                found = timed(works[work], works.get(beside), repeats)
                times[case] += [found] if count else []

            interleave(CASES, ROUNDS, once)
            wanted, equal = pipe.oracle(x)[-1].to(pipe.y.device, copy=True), True
            for beside in (OUT, IN):
                pipe.y.fill_(float("nan"))
                once((PIPELINE, beside), False)
                equal &= torch.equal(wanted, pipe.y)
            return records(m, times, {name: work.bytes for name, work in works.items()}, equal)


def timed(work: Work, beside: Work | None = None, repeats: int = 0) -> Timed:
    """Time a work that begins when another one has run once and goes on for `repeats` times."""
    synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    lead, last = torch.cuda.Event(), torch.cuda.Event()
    if beside is not None:
        with on(beside.stream):
            beside.enqueue()
            lead.record()
        work.stream.wait_event(lead)
    with on(work.stream):
        begin.record()
        work.enqueue()
        end.record()
    if beside is not None:
        with on(beside.stream):
            for _ in range(repeats):
                beside.enqueue()
            last.record()
    end.synchronize()
    covered = beside is None or not last.query()
    synchronize()
    return Timed(float(begin.elapsed_time(end)) * 1e3, covered)


def records(m: int, times: Mapping[Case, Sequence[Timed]], sent: Mapping[str, int], equal: bool) -> list[Record]:
    """A record per case; bandwidths are what the work itself sends, over all of its time."""
    median = {case: statistics.median(one.us for one in found) for case, found in times.items()}
    return [
        {
            "work": work, "beside": beside or None, "m": m, "n": WIDTH, "k": WIDTH, "dtype": "bf16",
            "rounds": len(found), "covered_rounds": sum(one.covered for one in found) if beside else None,
            "median_us": median[work, beside], "min_us": min(found).us, "max_us": max(found).us,
            "bytes": sent[work], "gb_per_s": sent[work] / median[work, beside] / 1e3 if sent[work] else None,
            "time_against_alone": median[work, beside] / median[work, ""],
            "bit_equal": equal if work == PIPELINE and beside else None,
        }
        for (work, beside), found in times.items()
    ]  # fmt: skip


def line(r: Record) -> str:
    """A record to look at."""
    rate = "" if r["gb_per_s"] is None else f"{r['gb_per_s']:6.0f} GB/s"
    covered = r["covered_rounds"] in (None, r["rounds"])
    note = "" if covered else f"  beside it in {r['covered_rounds']} of {r['rounds']} rounds only"
    note += "" if r["bit_equal"] in (None, True) else "  WRONG RESULT"
    figures = f"{r['median_us']:8.0f} us {rate:<11} {r['time_against_alone']:.3f} of alone"
    return f"M={r['m']:<6} {r['work']:<14} beside {r['beside'] or 'nothing':<14} {figures}{note}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", required=True, help="the commit that is measured")
    parser.add_argument("--out", type=Path, required=True, help="results file")
    given = parser.parse_args(arguments)
    if (count := torch.cuda.device_count()) < len(DEVICES):
        parser.exit(2, f"measure_third_gpu: needs {len(DEVICES)} GPUs, this machine has {count}\n")
    given.out.parent.mkdir(parents=True, exist_ok=True)
    found: list[Record] = []
    try:
        bench = Bench()
        for m in ROWS:
            found += bench.measure(m)
            given.out.write_text(json.dumps({"machine": facts(given.commit), "records": found}, indent=1) + "\n")
            print("\n".join(line(r) for r in found if r["m"] == m), flush=True)
    except TilerelayError as error:
        parser.exit(2, f"measure_third_gpu: {error}\n")
    return int(any(r["bit_equal"] is False for r in found))


if __name__ == "__main__":
    sys.exit(main())
