"""`tilerelay run`: one chain of GEMMs as a pipeline, checked against the layer-by-layer result, and timed."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tilerelay.cli.chain import (
    Backend,
    Chain,
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
from tilerelay.cli.progress import track
from tilerelay.errors import InvalidInput
from tilerelay.graph.workload import Workload

if TYPE_CHECKING:
    import torch

    from tilerelay.runtime.pipeline import Pipeline

SLOW_S = 20.0


def run(
    layers: Layers = 2,
    m: M = None,
    n: N = None,
    k: K = None,
    dtype: Dtype = "bf16",
    devices: Devices = "",
    placement: Placed = "pipelined",
    replicate: Annotated[bool, typer.Option(help="sharded: the whole output on every device")] = False,
    signalling: Signalling = "",
    kernel: Kernel = "",
    dependencies: Annotated[str, typer.Option(help="grouped (a counter per row panel) or per-tile")] = "grouped",
    backend: Backend = "",
    graph: Graph = True,
    repeat: Annotated[int, typer.Option(help="timed runs")] = 10,
    timeout: Timeout = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object instead of a table")] = False,
) -> None:
    """Run a chain of GEMMs as a pipeline and compare it with the same kernels run layer by layer."""
    if repeat < 1:
        raise InvalidInput(f"--repeat {repeat}: at least one run must be timed")
    if dependencies not in ("grouped", "per-tile"):
        raise InvalidInput(f"unknown dependencies {dependencies!r}; choose grouped or per-tile")
    chain = make_chain(
        layers, m, n, k, dtype=dtype, devices=devices, placement=placement, kernel=kernel, backend=backend,
        grouped=dependencies == "grouped",
    )  # fmt: skip
    record = measure(
        chain, graph=graph, repeat=repeat, signalling=signalling or None, timeout_s=timeout, replicate=replicate
    )
    record |= {"layers": layers, "dependencies": dependencies, **chain.size}
    record |= {"choice": chain.why} if chain.why else {}
    if as_json:
        print(json.dumps(record))
    else:
        _print(record)


def measure(chain: Chain, *, graph: bool, repeat: int, **options: Any) -> dict[str, Any]:
    """Build the pipeline on random data, compare it with the oracle and with fp32, and time it.

    Args:
        options: of the pipeline.

    Returns:
        What ran, whether it was right, and how long it took (see `tilerelay run --json`).

    Raises:
        TilerelayError: anything that the pipeline refuses, or an aborted run.
    """
    import torch

    from tilerelay.runtime.pipeline import Pipeline

    workload, backend = chain.workload, chain.backend
    if backend == "cpu" and (seconds := _interpreted_s(workload)) > SLOW_S:
        print(f"tilerelay: virtual devices interpret every tile: about {seconds:.0f} s a run", file=sys.stderr)
    weights, inputs = operands(chain)
    with Pipeline(
        workload, weights, placement=chain.placement, kernel=chain.kernel, backend=backend, **options
    ) as pipe:
        y = _poisoned_run(pipe, inputs)
        record: dict[str, Any] = pipe.describe() | {"dtype": workload.dtype, "tiles": workload.tiles}
        expected = pipe.oracle(inputs)[-1]
        record["bit_equal"] = all(bool(torch.equal(expected, whole)) for whole in y)
        record["max_rel_err_fp32"] = _relative_error(y[0], inputs[0], weights)
        record["timing"] = (
            "wall clock of an interpreter" if backend == "cpu" else ("CUDA graph" if graph else "eager launches")
        )
        times = [_time_us(pipe, call) for call in track(_calls(pipe, inputs, graph, repeat), repeat, "timing")]
    record["latency_us"] = {"median": statistics.median(times), "min": min(times), "max": max(times)}
    record["repeats"] = repeat
    return record


def _interpreted_s(workload: Workload) -> float:
    """Roughly how long the interpreter takes for a run: a millisecond a block product, of the longest stage."""
    from tilerelay.kernels.config import BLOCK_K

    return max(s.grid.tiles * (1 + s.k // BLOCK_K) for s in workload.stages) * 1e-3


def _poisoned_run(pipe: Pipeline, x: list[torch.Tensor]) -> list[torch.Tensor]:
    """Every whole output [M, N] of a run, on x's device, after all outputs were filled with NaN: nothing unwritten goes
    unseen. One where the output is cut by columns."""
    import torch

    for tensor in (*pipe.intermediates, *pipe.outputs):
        tensor.fill_(float("nan"))
    pipe.synchronize()
    pipe(x)
    pipe.synchronize()
    outputs = [tensor.to(x[0].device) for tensor in pipe.outputs]
    whole = pipe.replicate or len(outputs) == 1
    return outputs if whole else [torch.cat(outputs, dim=1)]


def _relative_error(y: torch.Tensor, x: torch.Tensor, weights: list[torch.Tensor]) -> float:
    """max |y - r| / max |r|, r being the chain in fp32 with no rounding between the layers."""
    r = x.float()
    for weight in weights:
        r = r @ weight.to(r.device).float().T
    return float((y.float() - r).abs().max() / r.abs().max())


def _calls(pipe: Pipeline, x: list[torch.Tensor], graph: bool, repeat: int) -> list[Callable[[], object]]:
    if pipe.backend == "cpu" or not graph:
        return [lambda: pipe(x)] * repeat
    return [pipe.capture(x).replay] * repeat


def _time_us(pipe: Pipeline, call: Callable[[], object]) -> float:
    import torch

    if pipe.backend == "cpu":
        began = time.perf_counter()
        call()
        return (time.perf_counter() - began) * 1e6
    with torch.cuda.device(pipe.placement.devices[0]):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        pipe.synchronize()
        begin.record()
        call()
        end.record()
        pipe.synchronize()
        return float(begin.elapsed_time(end)) * 1e3


def _print(record: dict[str, Any]) -> None:
    table = Table(show_header=False, box=None)
    for key, value in record.items():
        if key == "latency_us":
            value = f"median {value['median']:.0f}, min {value['min']:.0f}, max {value['max']:.0f}"
        table.add_row(key, f"{value:.1e}" if isinstance(value, float) else str(value))
    Console().print(table)
