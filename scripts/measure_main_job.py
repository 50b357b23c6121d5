"""Measures the main job on two GPUs: the GEMM kernels alone against cuBLAS, one GPU, the floor, and pipelines.

    PYTHONPATH=. python3 scripts/measure_main_job.py --commit $(git rev-parse --short HEAD) --out results.json

Every method is one CUDA graph; all of a batch size are interleaved round by round. `floor` is the time of both layers
at once, one per GPU, with cuBLAS and no communication; ratios are to the floor of the same rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")

import torch

from tilerelay import Pipeline, dense_chain, gemm_chain, pipelined
from tilerelay.bench.clocks import Sampler, open_sampler
from tilerelay.bench.machine import facts
from tilerelay.bench.rounds import interleave
from tilerelay.graph.workload import with_orders
from tilerelay.kernels.config import DEFAULT_TILE, configure
from tilerelay.runtime.cuda import Fork, on, open_peers
from tilerelay.runtime.oracle import LayerByLayer

WIDTH = 8192
ROWS = (1024, 2048, 4096, 8192, 16384, 32768)
TWO_GPUS = ("pipelined", "eager", "eager-held-back")
Run = Callable[[], object]


def random_tensor(rows: int, columns: int, device: int) -> torch.Tensor:
    """[rows, columns] bf16, normal; as weights, scaled so that outputs stay near one."""
    return torch.randn(rows, columns, dtype=torch.bfloat16, device=f"cuda:{device}")


def captured(bodies: list[tuple[torch.cuda.Stream, Run]]) -> Run:
    """One CUDA graph of several streams' work, side by side."""
    home = bodies[0][0]
    fork = Fork([stream for stream, _ in bodies[1:]], home.device_index)

    def enqueue() -> None:
        fork.fork(home)
        for stream, body in bodies:
            with on(stream):
                body()
        fork.join(home)

    with on(home):
        enqueue()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=home, capture_error_mode="relaxed"):
            enqueue()
    return graph.replay


class Bench:
    """Operands of the largest batch, and the methods of one batch size."""

    def __init__(self) -> None:
        open_peers([0, 1])
        torch.manual_seed(0)
        self.streams = [torch.cuda.Stream(device) for device in (0, 1)]
        self.x = [random_tensor(max(ROWS), WIDTH, 0)]
        self.x.append(self.x[0].to("cuda:1"))
        self.weights = [random_tensor(WIDTH, WIDTH, device) / WIDTH**0.5 for device in (0, 1)]
        self.y = [torch.empty_like(x) for x in self.x]
        self.sms = torch.cuda.get_device_properties(0).multi_processor_count

    def matmul(self, device: int, m: int) -> Run:
        return lambda: torch.mm(self.x[device][:m], self.weights[device].T, out=self.y[device][:m])

    def alone(self, kernel: str, m: int, layers: int = 1) -> LayerByLayer:
        tile = DEFAULT_TILE[kernel]
        workload = with_orders(gemm_chain(layers, m, WIDTH, WIDTH, tile=tile), [self.sms] * layers)
        weights = [w.to("cuda:0") for w in self.weights[:layers]]
        return LayerByLayer(
            workload, weights, [None] * layers, [configure(kernel, tile)] * layers, self.x[0].device, self.sms
        )

    def methods(self, m: int, keep: list[Any]) -> dict[tuple[str, str, str], Run]:
        """By (method, kernel, signalling)."""
        s0, s1 = self.streams
        runs: dict[tuple[str, str, str], Run] = {
            ("floor", "cublas", ""): captured([(s0, self.matmul(0, m)), (s1, self.matmul(1, m))]),
            ("gemm", "cublas", ""): captured([(s0, self.matmul(0, m))]),
        }
        for kernel in ("persistent", "classical"):
            gemm = self.alone(kernel, m)
            keep.append(gemm)
            runs["gemm", kernel, ""] = captured([(s0, partial(gemm.run, self.x[0][:m]))])
        chain = self.alone("persistent", m, layers=2)
        keep.append(chain)
        runs["one-gpu", "persistent", ""] = captured([(s0, partial(chain.run, self.x[0][:m]))])
        for kernel in ("persistent", "classical"):
            for signalling in ("queue", "counter"):
                workload = dense_chain(m, [WIDTH] * 3, tile=DEFAULT_TILE[kernel])
                pipe = Pipeline(
                    workload, self.weights, placement=pipelined([0, 1]), kernel=kernel, signalling=signalling
                )
                keep.append(pipe)
                runs["pipelined", kernel, signalling] = pipe.capture(self.x[0][:m], all_streams=False).replay
        # Launched from Python each time, since a captured wait value would be stale: what holding a stream back costs.
        for method, hold_back in (("eager", False), ("eager-held-back", True)):
            workload = dense_chain(m, [WIDTH] * 3, tile=DEFAULT_TILE["persistent"])
            pipe = Pipeline(
                workload, self.weights, placement=pipelined([0, 1]), signalling="queue", hold_back=hold_back
            )
            keep.append(pipe)
            runs[method, "persistent", "queue"] = partial(pipe, self.x[0][:m])
        return runs

    def equal(self, pipe: Pipeline, m: int, run: Run) -> bool:
        """The pipeline's outputs, filled with NaN before, are the oracle's bits."""
        for tensor in (*pipe.intermediates, *pipe.outputs):
            tensor.fill_(float("nan"))
        synchronize()
        run()
        pipe.synchronize()
        expected = pipe.oracle(self.x[0][:m])
        got = [*pipe.intermediates, *pipe.outputs]
        return all(torch.equal(want.to(have.device), have) for want, have in zip(expected, got, strict=True))


def synchronize() -> None:
    for device in (0, 1):
        torch.cuda.synchronize(device)


def time_us(run: Run, stream: torch.cuda.Stream) -> float:
    synchronize()
    with on(stream):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
    synchronize()
    return float(begin.elapsed_time(end)) * 1e3


def measure(bench: Bench, m: int, rounds: int, sampler: Sampler) -> list[dict[str, Any]]:
    keep: list[Any] = []
    runs = bench.methods(m, keep)
    pipes = iter([kept for kept in keep if isinstance(kept, Pipeline)])
    equal = {key: bench.equal(next(pipes), m, run) for key, run in runs.items() if key[0] in TWO_GPUS}
    times: dict[tuple[str, str, str], list[float]] = {key: [] for key in runs}
    clocks: dict[tuple[str, str, str], list[float]] = {key: [] for key in runs}

    def once(key: tuple[str, str, str], timed: bool) -> None:
        took = time_us(runs[key], bench.streams[0])
        reading = sampler.read()
        if timed:
            times[key].append(took)
            clocks[key] += [reading.sm_clock_mhz] if reading else []

    interleave(list(runs), rounds, once)
    for kept in keep:
        if isinstance(kept, Pipeline):
            kept.close()
    median = {key: statistics.median(values) for key, values in times.items()}
    floor, cublas = median["floor", "cublas", ""], median["gemm", "cublas", ""]
    return [
        {
            "method": method, "kernel": kernel, "signalling": signalling or None,
            "gpus": 2 if method in ("floor", *TWO_GPUS) else 1, "layers": 1 if method == "gemm" else 2,
            "m": m, "n": WIDTH, "k": WIDTH, "dtype": "bf16", "rounds": rounds,
            "median_us": median[key], "min_us": min(times[key]), "max_us": max(times[key]),
            "ratio_to_floor": median[key] / floor,
            "speed_against_cublas": cublas / median[key] if method == "gemm" else None,
            "sm_clock_mhz": statistics.median(clocks[key]) if clocks[key] else None,
            "bit_equal": equal.get(key),
        }
        for key in runs
        for method, kernel, signalling in [key]
    ]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args(arguments)
    if torch.cuda.device_count() < 2:
        parser.exit(2, f"measure_main_job: needs 2 GPUs, this machine has {torch.cuda.device_count()}\n")
    machine = facts(given.commit)
    sampler = open_sampler([f"GPU-{torch.cuda.get_device_properties(d).uuid}" for d in (0, 1)])
    records: list[dict[str, Any]] = []
    bench = Bench()
    for m in ROWS:
        records += measure(bench, m, given.rounds, sampler)
        given.out.write_text(json.dumps({"machine": machine, "records": records}, indent=1))
    sampler.close()
    for r in records:
        speed, equal = r["speed_against_cublas"], r["bit_equal"]
        print(
            f"M={r['m']:<6} {r['method']:<10} {r['kernel']:<11} {r['signalling'] or '':<8} {r['median_us']:8.0f} us "
            f"{r['ratio_to_floor']:.3f} of floor"
            + ("" if speed is None else f"  {speed:.3f}x cuBLAS")
            + ("" if equal is None else f"  bit-equal {equal}")
        )


if __name__ == "__main__":
    main()
