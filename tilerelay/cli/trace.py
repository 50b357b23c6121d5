"""`tilerelay trace`: trace a run (`run`), look at a trace (`show`), what the protocol costs a tile (`overhead`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tilerelay.cli.chain import (
    Backend,
    Devices,
    Dtype,
    Graph,
    K,
    Kernel,
    Layers,
    M,
    N,
    Placed,
    Signalling,
    Timeout,
    make_chain,
    operands,
)
from tilerelay.cli.timeline import draw
from tilerelay.errors import InvalidInput
from tilerelay.graph.cut import cut
from tilerelay.trace import chrome, html
from tilerelay.trace.events import Trace
from tilerelay.trace.overhead import PAPER_US, QUANTITIES, overhead
from tilerelay.trace.summary import summarise
from tilerelay.trace.text import summary_lines

trace = typer.Typer(help="Every tile of a run: when it was seen, loaded, computed, stored and published.")

Out = Annotated[Path | None, typer.Option(help="write the trace here, as JSON that the Perfetto UI opens")]
Html = Annotated[Path | None, typer.Option("--html", help="write a page with a timeline per device here")]
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON object")]
TraceFile = Annotated[Path, typer.Argument(help="file that `tilerelay trace run --out` wrote")]


@trace.command("run")
def trace_run(
    layers: Layers = 2,
    m: M = None,
    n: N = None,
    k: K = None,
    dtype: Dtype = "bf16",
    devices: Devices = "",
    placement: Placed = "pipelined",
    signalling: Signalling = "",
    kernel: Kernel = "",
    backend: Backend = "",
    graph: Graph = True,
    timeout: Timeout = 10.0,
    out: Out = None,
    page: Html = None,
) -> None:
    """Run a chain of GEMMs once with a time stamp at every step of every tile, and say where the time went."""
    from tilerelay.runtime import tracing
    from tilerelay.runtime.pipeline import Pipeline

    for path in (out, page):
        _check_writable(path)
    if out and page and out.resolve() == page.resolve():
        raise InvalidInput(f"--out and --html both write {out}; name two files")
    chain = make_chain(
        layers, m, n, k, dtype=dtype, devices=devices, placement=placement, kernel=kernel, backend=backend
    )
    parts = cut(chain.workload, chain.placement)
    tracing.check_room(parts.workload, parts.placement, tracing.free_bytes(chain.backend))
    weights, inputs = operands(chain)
    with Pipeline(
        chain.workload, weights, placement=chain.placement, signalling=signalling or None, kernel=chain.kernel,
        backend=chain.backend, timeout_s=timeout, trace=True,
    ) as pipe:  # fmt: skip
        table = tracing.trace_run(pipe, inputs, graph=graph)
    if out:
        chrome.write(table, out)
    if page:
        html.write(table, page)
    _show(table)


@trace.command("show")
def trace_show(file: TraceFile, page: Html = None, as_json: AsJson = False) -> None:
    """Say where the time of a traced run went."""
    table = chrome.read(file)
    if page:
        html.write(table, page)
    if as_json:
        print(json.dumps(summarise(table).to_json()))
    else:
        _show(table)


@trace.command("overhead")
def trace_overhead(file: TraceFile, as_json: AsJson = False) -> None:
    """The protocol's cost per tile, beside the paper's: T1 to T4 of its section III.C."""
    table = chrome.read(file)
    found = overhead(table)
    if as_json:
        print(json.dumps({name: quantity.to_json() for name, quantity in found.items()}))
        return
    if table.clock.unit != "ns":
        raise InvalidInput(f"{file}: its clock counts {table.clock.unit}; overheads need a clock that counts ns")
    paper = PAPER_US.get(table.stages[0].kernel, {})
    shown = Table("", "what", "paper, us", "median, us", "p05", "p95", "tiles", "hidden", box=None)
    for name, q in found.items():
        numbers = ["-" if us is None else f"{us:.2f}" for us in (paper.get(name), q.median, q.p05, q.p95)]
        hidden = "-" if q.hidden is None else f"{100 * q.hidden:.1f} %"
        shown.add_row(name, QUANTITIES[name], *numbers, f"{q.tiles} of {q.of}", hidden)
    Console().print(shown)


def _show(table: Trace) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print("\n".join(summary_lines(table)), markup=False)
    console.print(draw(table), markup=False)


def _check_writable(path: Path | None) -> None:
    """Before the run, not after it. Raises InvalidInput."""
    if path is not None and not path.absolute().parent.is_dir():
        raise InvalidInput(f"{path}: the folder {path.absolute().parent} does not exist")
