"""Measures the protocol's overhead on two GPUs and traces a pipelined run.

python scripts/measure_trace.py --commit COMMIT --out DIR

writes to DIR: overhead.json and overhead.md (the analysis of the paper's section III.C), trace.json (open it in the
Perfetto UI), trace.html and trace-sharded.html (open them in a browser) and trace-slice.json (the first row panels of
trace.json).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tilerelay.errors import TilerelayError
from tilerelay.graph.catalog import gemm_chain
from tilerelay.graph.placement import Placement, pipelined, sharded, shared
from tilerelay.graph.tiling import TileGrid, grouped_order, row_panel_order
from tilerelay.graph.workload import Workload, with_orders
from tilerelay.kernels.config import DEFAULT_TILE, KERNELS, configure
from tilerelay.runtime import cuda
from tilerelay.runtime.pipeline import Pipeline
from tilerelay.runtime.protocol_cost import ProducerAlone, captured, interleaved, resources
from tilerelay.runtime.tracing import trace_run
from tilerelay.trace import chrome, html
from tilerelay.trace.events import DEVICE, OBTAINED, PUBLISHED, STAGE, Trace
from tilerelay.trace.overhead import overhead
from tilerelay.trace.overhead_report import ORDERS, OWN_ORDER, PROTOCOLS, markdown

DEVICES = (0, 1)
SLICE_ROWS = 6  # tile rows in the slice
TIMEOUT_S = 5.0
SIGNALLING = "counter"  # of all pipelines here, also where their default would be another


def ordered(workload: Workload, order: str) -> Workload:
    """The chain with its first stage's tiles in the named order (of ORDERS)."""
    if order == OWN_ORDER:
        return workload
    grid: TileGrid = workload.stages[0].grid
    tiles = row_panel_order(grid) if order == "row-major" else grouped_order(grid, grid.rows)
    return replace(workload, stages=(replace(workload.stages[0], order=tiles), *workload.stages[1:]))


class Measurement:
    """Operands on both GPUs, and the report as it grows."""

    def __init__(self, m: int, n: int, k: int, rounds: int, commit: str) -> None:
        from tilerelay.bench.machine import facts

        self.m, self.n, self.k, self.rounds = m, n, k, rounds
        self.sms = cuda.check_machine(DEVICES)
        cuda.open_peers(DEVICES)
        torch.manual_seed(0)
        self.x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda:0")
        shapes = ((n, k), (n, n))
        weights = [torch.randn(s, dtype=torch.bfloat16, device="cuda:0").mul_(s[1] ** -0.5) for s in shapes]
        self.weights = {d: [w.to(f"cuda:{d}") for w in weights] for d in DEVICES}
        self.out = {d: torch.empty(m, n, dtype=torch.bfloat16, device=f"cuda:{d}") for d in DEVICES}
        self.report: dict[str, Any] = {
            "shape": [m, n, k], "signalling": SIGNALLING, "commit": commit, "machine": facts(commit), "clock": {},
            "quantities": [], "alone": [], "resources": [], "pipelined": [], "tracing": [],
        }  # fmt: skip

    def workload(self, kernel: str, order: str) -> Workload:
        return ordered(gemm_chain(2, self.m, self.n, self.k, tile=DEFAULT_TILE[kernel]), order)

    def note(self, trace: Trace, publishing: tuple[int, ...] | None = None, **where: str) -> None:
        """Add a trace's quantities to the report."""
        for name, quantity in overhead(trace, publishing=publishing).items():
            self.report["quantities"].append({**where, "name": name, **quantity.to_json()})

    def resources(self, kernel: str) -> None:
        for protocol in PROTOCOLS:
            found = resources(configure(kernel, DEFAULT_TILE[kernel]), protocol)
            if found:
                self.report["resources"].append({"kernel": kernel, "protocol": protocol, **found})

    def alone(self, kernel: str) -> None:
        """The GEMM alone on GPU 0: every order, destination, with and without the protocol."""
        device = DEVICES[0]
        config = configure(kernel, DEFAULT_TILE[kernel], cuda.shared_memory_limit(device))
        made: list[ProducerAlone] = []

        def run(order: str, place: str, announce: bool, stamps: bool) -> ProducerAlone:
            consumer = DEVICES[place == "peer"]
            # The pipeline's own order is that for whole devices, wherever the output goes.
            workload = with_orders(self.workload(kernel, order), [self.sms[d] for d in DEVICES])
            one = ProducerAlone(
                workload, config, self.x, self.weights[device][0], self.out[consumer], device=device,
                consumer=consumer, announce=announce, stamps=stamps, sms=self.sms[device],
                torch_device=lambda d: torch.device("cuda", d),
            )  # fmt: skip
            one()
            made.append(one)  # graphs point at its memory
            return one

        cases = [(o, place, announce) for o in ORDERS for place in ("local", "peer") for announce in (False, True)]
        with torch.cuda.device(device):
            graphs = {f"{case}": captured(run(*case, stamps=False), device) for case in cases}
            times = interleaved(graphs, device, self.rounds)
            for order, place, announce in cases:
                where = {"kernel": kernel, "order": order, "destination": place}
                us = times[f"{(order, place, announce)}"].to_json()
                self.report["alone"].append({**where, "protocol": announce, "us": us})
                if announce:
                    stamped = run(order, place, True, stamps=True)
                    for _ in range(2):
                        stamped()
                    torch.cuda.synchronize(device)
                    self.note(stamped.trace("globaltimer"), publishing=(0,), run="alone", **where)

    @contextmanager
    def pipeline(
        self, kernel: str, order: str, placement: Placement | None = None, trace: bool = True
    ) -> Iterator[Pipeline]:
        placement = placement or pipelined(DEVICES)
        weights = [self.weights[placement.device_of(i)][i] for i in range(2)]
        with Pipeline(
            self.workload(kernel, order), weights, placement=placement, signalling=SIGNALLING, kernel=kernel,
            trace=trace, timeout_s=TIMEOUT_S,
        ) as pipe:  # fmt: skip
            yield pipe

    def pipelined(self, kernel: str, order: str) -> Trace:
        """A traced run on both GPUs, and the latencies with and without tracing."""
        with ExitStack() as stack:
            plain = stack.enter_context(self.pipeline(kernel, order, trace=False))
            pipe = stack.enter_context(self.pipeline(kernel, order))
            graphs = {"off": plain.capture(self.x).replay, "on": pipe.capture(self.x).replay}
            times = interleaved(graphs, DEVICES[0], self.rounds)
            pipe.synchronize()
            trace = trace_run(pipe, self.x)
        self.note(trace, run="pipelined", kernel=kernel, order=order, destination="peer")
        at = [trace.at[trace.keys[:, STAGE] == stage] - trace.begin for stage in range(2)]
        self.report["pipelined"].append(
            {
                "kernel": kernel, "order": order, "latency_us": times["off"].median,
                "producer_end_us": float(at[0][:, PUBLISHED].max()) / 1e3,
                "consumer_begin_us": float(at[1][:, OBTAINED].min()) / 1e3,
                "consumer_end_us": float(at[1][:, PUBLISHED].max()) / 1e3,
            }
        )  # fmt: skip
        if order == OWN_ORDER:
            off, on = times["off"].median, times["on"].median
            self.report["tracing"].append({"kernel": kernel, "off_us": off, "on_us": on})
            self.report["clock"] = {"granularity_ns": trace.clock.granularity, "error_ns": trace.clock.error}
        return trace

    def shares(self) -> None:
        """Both stages on shares of GPU 0: tiles and signals stay in its memory."""
        placement = shared(2, DEVICES[:1], self.sms[DEVICES[0]])
        for order in ORDERS:
            with self.pipeline("persistent", order, placement) as pipe:
                trace = trace_run(pipe, self.x)
            self.note(trace, run="shares", kernel="persistent", order=order, destination="local")

    def sharded(self) -> Trace:
        """Both stages cut over both GPUs, one kernel on each."""
        placement = sharded([self.n, self.n], DEVICES)
        weights = self.weights[DEVICES[0]]
        with Pipeline(
            self.workload("persistent", OWN_ORDER), weights, placement=placement, trace=True, timeout_s=TIMEOUT_S
        ) as pipe:
            trace = trace_run(pipe, [self.x.to(f"cuda:{d}") for d in DEVICES])
        self.note(trace, run="sharded", kernel="persistent", order=OWN_ORDER, destination="both")
        return trace


def say(text: str) -> None:
    print(text, flush=True)


def measure(given: argparse.Namespace) -> Mapping[str, Any]:
    began = time.monotonic()

    def done(what: str) -> None:
        say(f"[{time.monotonic() - began:5.1f} s] {what}")

    work = Measurement(given.m, given.n, given.k, given.rounds, given.commit)
    done("operands are there")
    kept: Trace | None = None
    for kernel in reversed(KERNELS):  # the persistent kernel last: its trace is the one that is kept
        work.resources(kernel)
        work.alone(kernel)
        done(f"{kernel}: alone")
        for order in ORDERS:
            trace = work.pipelined(kernel, order)
            kept = trace if order == OWN_ORDER else kept
            done(f"{kernel}: pipelined, {order} order")
    work.shares()
    done("persistent: on shares of one GPU")
    cut = work.sharded()
    done("persistent: sharded")
    assert kept is not None
    given.out.mkdir(parents=True, exist_ok=True)
    chrome.write(kept, given.out / "trace.json")
    chrome.write(kept.rows(0, SLICE_ROWS), given.out / "trace-slice.json")
    what = f"Two GEMMs {given.m} x {given.n} x {given.k} on two GPUs, every tile"
    html.write(kept, given.out / "trace.html", what)
    html.write(cut, given.out / "trace-sharded.html", f"{what}: stages cut by columns")
    (given.out / "overhead.json").write_text(json.dumps(work.report, indent=1) + "\n")
    (given.out / "overhead.md").write_text(markdown(work.report))
    done(f"written to {given.out}: {len(kept)} tiles of {len(set(kept.keys[:, DEVICE].tolist()))} GPUs")
    return work.report


def short_table(report: Mapping[str, Any]) -> list[str]:
    """What is worth a look at once: the runs in the pipeline's own order, a line each."""
    row = "{:<11} {:<10} {:<6} {:<6} {:>8} {:>8} {:>8} {:>7}"
    lines = [row.format("kernel", "run", "to", "what", "p05", "median", "p95", "hidden")]
    for q in report["quantities"]:
        values = ("-" if q[p] is None else f"{q[p]:.2f}" for p in ("p05", "median", "p95"))
        hidden = "-" if q["hidden"] is None else f"{100 * q['hidden']:.1f} %"
        if q["order"] == OWN_ORDER:
            lines.append(row.format(q["kernel"], q["run"], q["destination"], q["name"], *values, hidden))
    for a in report["alone"]:
        if a["order"] == OWN_ORDER:
            what = "with protocol" if a["protocol"] else "no protocol"
            lines.append(f"{a['kernel']}: alone, {a['destination']}, {what}: {a['us']['median']:.0f} us")
    for run in report["pipelined"]:
        lines.append(
            f"{run['kernel']}, {run['order']}: producer ends at {run['producer_end_us']:.0f} us, consumer at "
            f"{run['consumer_end_us']:.0f} us; latency {run['latency_us']:.0f} us"
        )
    for t in report["tracing"]:
        lines.append(f"{t['kernel']}: tracing costs {100 * (t['on_us'] / t['off_us'] - 1):+.2f} %")
    return lines


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measures the protocol's overhead on two GPUs and traces a run.")
    parser.add_argument("--commit", required=True, help="the commit that is measured")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--m", type=int, default=16384)
    parser.add_argument("--n", type=int, default=8192)
    parser.add_argument("--k", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=11, help="timed rounds of every method")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    try:
        report = measure(parse(arguments))
    except TilerelayError as error:
        print(f"measure_trace: {error}", file=sys.stderr)
        return 2
    say("\n".join(short_table(report)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
