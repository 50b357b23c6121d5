"""`tilerelay trace`: trace a run (`run`), look at a trace (`show`), what the protocol costs a tile (`overhead`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tilerelay.cli.run import SIZES, _place
from tilerelay.cli.timeline import draw
from tilerelay.errors import InvalidInput
from tilerelay.graph.catalog import gemm_chain
from tilerelay.graph.cut import cut
from tilerelay.trace import chrome, html
from tilerelay.trace.events import Trace
from tilerelay.trace.overhead import PAPER_US, QUANTITIES, overhead
from tilerelay.trace.summary import summarise
from tilerelay.trace.text import summary_lines

trace = typer.Typer(help="Every tile of a run: when it was seen, loaded, computed, stored and published.")

# The same options as `tilerelay run`, where they mean the same.
Out = Annotated[Path | None, typer.Option(help="write the trace here, as JSON that the Perfetto UI opens")]
Html = Annotated[Path | None, typer.Option("--html", help="write a page with a timeline per device here")]
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON object")]
TraceFile = Annotated[Path, typer.Argument(help="file that `tilerelay trace run --out` wrote")]


@trace.command("run")
def trace_run(
    layers: Annotated[int, typer.Option(min=1, max=64, help="number of GEMMs, one stage each")] = 2,
    m: Annotated[int | None, typer.Option(help="rows of the batch; default 16384, or 256 on virtual devices")] = None,
    n: Annotated[int | None, typer.Option(help="columns of every layer's output; default 8192, or 128")] = None,
    k: Annotated[int | None, typer.Option(help="columns of the input; default 8192, or 128")] = None,
    dtype: Annotated[str, typer.Option(help="bf16 or fp16")] = "bf16",
    devices: Annotated[str, typer.Option(help="devices to use, as in 0,1")] = "",
    placement: Annotated[
        str, typer.Option(help="pipelined, sharded, auto, or a device per layer: 0:66,0:66")
    ] = "pipelined",
    signalling: Annotated[str, typer.Option(help="queue or counter; default: as the placement needs")] = "",
    kernel: Annotated[str, typer.Option(help="persistent or classical; default: persistent on GPUs")] = "",
    backend: Annotated[str, typer.Option(help="cuda or cpu (virtual devices); default: cuda with a GPU")] = "",
    graph: Annotated[bool, typer.Option(help="replay a CUDA graph instead of launching from Python")] = True,
    timeout: Annotated[float, typer.Option(help="deadline of every wait, seconds")] = 10.0,
    out: Out = None,
    page: Html = None,
) -> None:
    """Run a chain of GEMMs once with a time stamp at every step of every tile, and say where the time went."""
    import torch

    from tilerelay.runtime import tracing
    from tilerelay.runtime.oracle import TORCH_DTYPES
    from tilerelay.runtime.pipeline import Pipeline

    for path in (out, page):
        _check_writable(path)
    backend = backend or ("cuda" if torch.cuda.is_available() else "cpu")
    if backend not in SIZES:
        raise InvalidInput(f"unknown backend {backend!r}; choose cuda or cpu")
    kernel = kernel or ("persistent" if backend == "cuda" else "classical")
    size = {key: SIZES[backend][key] if value is None else value for key, value in (("m", m), ("n", n), ("k", k))}
    placed, tile, _ = _place(placement, devices, layers, size, backend, kernel)
    workload = gemm_chain(layers, **size, dtype=dtype, tile=tile)
    if len(placed.stages) != layers:
        raise InvalidInput(f"{len(placed.stages)} devices for {layers} layers; give one for each, or SM shares")
    if backend == "cuda":
        from tilerelay.runtime.cuda import check_machine

        check_machine(placed.devices)
    parts = cut(workload, placed)
    tracing.check_room(parts.workload, parts.placement, tracing.free_bytes(backend))
    torch.manual_seed(0)
    where = ["cpu" if backend == "cpu" else f"cuda:{parts_of[0].device}" for parts_of in placed.stages]
    element = TORCH_DTYPES[workload.dtype]
    weights = [
        (torch.randn(s.grid.n, s.k, device=d) / s.k**0.5).to(element)
        for s, d in zip(workload.stages, where, strict=True)
    ]
    x = torch.randn(workload.stages[0].grid.m, workload.stages[0].k, device=where[0]).to(element)
    with Pipeline(
        workload, weights, placement=placed, signalling=signalling or None, kernel=kernel, backend=backend,
        timeout_s=timeout, trace=True,
    ) as pipe:  # fmt: skip
        table = tracing.trace_run(pipe, x, graph=graph)
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
