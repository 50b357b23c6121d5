"""Measures the persistent GEMM against cuBLAS over shapes, on one GPU.

    PYTHONPATH=. python scripts/measure_gemm.py --commit $(git rev-parse --short HEAD) --out gemm.json

For every shape: cuBLAS, our kernel as the cost model picks it (graph.choice), and what else it could have picked. Each
is a CUDA graph; all of a shape are interleaved round by round. "spaced" runs come after a rest, as single requests do;
"steady" ones after milliseconds of their own kind, so that they run at the clock that the power cap leaves them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")

import torch

from tilerelay.bench.clocks import open_sampler
from tilerelay.bench.machine import facts
from tilerelay.bench.rounds import interleave
from tilerelay.graph.choice import TILES, choose_tile
from tilerelay.graph.tiling import TileGrid
from tilerelay.graph.workload import Stage, chain, with_orders, with_walk
from tilerelay.kernels.config import BLOCK_K, configure
from tilerelay.runtime.oracle import LayerByLayer

ROWS = (512, 1024, 2048, 4096, 8192, 16384)
WEIGHTS = ((8192, 8192), (4096, 8192), (8192, 4096), (14336, 8192), (4096, 28672), (28672, 8192), (8192, 28672))
STEADY_MS, REST_S = 3.0, 0.004
Run = Callable[[], object]


class Bench:
    """Operands of one [n, k] weight, and all methods for a number of rows."""

    def __init__(self, n: int, k: int) -> None:
        self.n, self.k = n, k
        self.stream = torch.cuda.Stream()
        self.kept: list[LayerByLayer] = []
        self.sms = torch.cuda.get_device_properties(0).multi_processor_count
        with torch.cuda.stream(self.stream):
            self.x = torch.randn(max(ROWS), k, dtype=torch.bfloat16, device="cuda")
            self.weight = torch.randn(n, k, dtype=torch.bfloat16, device="cuda") / k**0.5
            self.y = torch.empty(max(ROWS), n, dtype=torch.bfloat16, device="cuda")

    def captured(self, body: Run) -> Run:
        with torch.cuda.stream(self.stream):
            body()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.stream):
                body()
        return graph.replay

    def ours(self, m: int, tile: tuple[int, int], *, shared_sums: bool) -> tuple[LayerByLayer, str]:
        """The kernel alone, and its name; sums are shared only where the last wave is thin."""
        plain = Stage("gemm", TileGrid(m, self.n, *tile), self.k)
        stage = with_walk(plain, self.sms, unit=BLOCK_K) if shared_sums else plain
        workload = with_orders(chain([stage]), [self.sms])
        name = f"{tile[0]}x{tile[1]}" + (" shared sums" if stage.walk else "")
        config = configure("persistent", tile)
        return LayerByLayer(workload, [self.weight], [None], [config], self.x.device, self.sms), name

    def methods(self, m: int) -> tuple[dict[str, Run], str, bool]:
        """Runs by name, the one that the cost model picks, and whether all of ours give the same bits."""
        x, y = self.x[:m], self.y[:m]
        self.kept = []  # a graph does not keep what it runs on
        runs = {"cuBLAS": self.captured(lambda: torch.mm(x, self.weight.T, out=y))}
        picked = ""
        for tile in TILES:
            for shared_sums in (False, True):
                gemm, name = self.ours(m, tile, shared_sums=shared_sums)
                if name not in runs:
                    runs[name] = self.captured(lambda gemm=gemm: gemm.run(x))  # type: ignore[misc]
                    gemm.outputs[0].fill_(float("nan"))
                    runs[name]()
                    self.kept.append(gemm)
                if tile == choose_tile(m, self.n, self.k, sms=self.sms) and shared_sums:
                    picked = name
        torch.cuda.synchronize()
        first, *others = (gemm.outputs[0] for gemm in self.kept)
        return runs, picked, all(torch.equal(first, other) for other in others)

    def time_us(self, run: Run, repeats: int) -> float:
        """The last of some runs in a row."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self.stream):
            for _ in range(repeats - 1):
                run()
            begin.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) * 1e3


def measure(bench: Bench, m: int, rounds: int, clock: Callable[[], float | None]) -> dict[str, Any]:
    runs, picked, equal = bench.methods(m)
    repeats = {name: 1 + math.ceil(STEADY_MS * 1e3 / bench.time_us(run, 2)) for name, run in runs.items()}
    record: dict[str, Any] = {"m": m, "n": bench.n, "k": bench.k, "picked": picked, "same_bits": equal}
    for regime in ("spaced", "steady"):
        times: dict[str, list[float]] = {name: [] for name in runs}
        clocks: dict[str, list[float]] = {name: [] for name in runs}

        def once(name: str, timed: bool, regime: str = regime, times: Any = times, clocks: Any = clocks) -> None:
            if regime == "spaced":
                time.sleep(REST_S)
            took = bench.time_us(runs[name], repeats[name] if regime == "steady" else 1)
            mhz = clock()
            if timed:
                times[name].append(took)
                clocks[name] += [mhz] if mhz else []

        interleave(list(runs), rounds, once)
        record[regime] = {
            name: {
                "median_us": statistics.median(us), "min_us": min(us), "max_us": max(us),
                "sm_clock_mhz": statistics.median(clocks[name]) if clocks[name] else None,
            }
            for name, us in times.items()
        }  # fmt: skip
    return record


def speed(record: dict[str, Any], regime: str, name: str) -> float:
    """Times as fast as cuBLAS."""
    found = record[regime]
    return float(found["cuBLAS"]["median_us"] / found[name]["median_us"])


def summary(records: list[dict[str, Any]]) -> list[str]:
    lines = []
    for r in records:
        ours = [name for name in r["spaced"] if name != "cuBLAS"]
        cells = [
            f"{regime} {r[regime]['cuBLAS']['median_us']:.0f} us: "
            + ", ".join(f"{name}{'*' if name == r['picked'] else ''} {speed(r, regime, name):.3f}" for name in ours)
            for regime in ("spaced", "steady")
        ]
        lines.append(
            f"M={r['m']} N={r['n']} K={r['k']}: " + "; ".join(cells) + ("" if r["same_bits"] else " BITS DIFFER")
        )
    for regime in ("spaced", "steady"):
        picked = [speed(r, regime, r["picked"]) for r in records]
        best = [max(speed(r, regime, name) for name in r[regime] if name != "cuBLAS") for r in records]
        lines.append(
            f"{regime}: geometric mean {statistics.geometric_mean(picked):.3f}x cuBLAS, least {min(picked):.3f}x; "
            f"best of all {statistics.geometric_mean(best):.3f}x, {min(best):.3f}x ({len(records)} shapes)"
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", required=True, help="noted in the results")
    parser.add_argument("--out", type=Path, required=True, help="results file; written after each weight's batch sizes")
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds; 15 take about a minute in all")
    given = parser.parse_args(arguments)
    if not torch.cuda.device_count():
        parser.exit(2, "measure_gemm: needs a Hopper GPU, this machine has none\n")
    if not given.out.parent.is_dir() or given.rounds < 1:
        parser.error(f"--out {given.out} needs a folder that exists, and --rounds a positive number")
    machine = facts(given.commit)
    sampler = open_sampler([f"GPU-{torch.cuda.get_device_properties(0).uuid}"])

    def clock() -> float | None:
        reading = sampler.read()
        return reading.sm_clock_mhz if reading else None

    records: list[dict[str, Any]] = []
    for n, k in WEIGHTS:
        bench = Bench(n, k)
        records += [measure(bench, m, given.rounds, clock) for m in ROWS]
        given.out.write_text(json.dumps({"machine": machine, "records": records}, indent=1))
        print("\n".join(summary(records)[-2 - len(ROWS) : -2]), flush=True)
    sampler.close()
    print("\n".join(summary(records)[-2:]))


if __name__ == "__main__":
    main()
