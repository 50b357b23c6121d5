"""`tilerelay run`: one chain of GEMMs as a pipeline, checked against the layer-by-layer result, and timed."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tilerelay.cli.progress import track
from tilerelay.errors import InvalidInput
from tilerelay.graph.library import gemm_chain
from tilerelay.graph.placement import Placement, pipelined, shared
from tilerelay.graph.workload import Workload

if TYPE_CHECKING:
    import torch

    from tilerelay.runtime.pipeline import Pipeline

# The paper's size on GPUs; on virtual devices, what an interpreter does in seconds.
SIZES = {"cuda": {"m": 16384, "n": 8192, "k": 8192}, "cpu": {"m": 256, "n": 128, "k": 128}}
VIRTUAL_TILE = (64, 64)


def run(
    layers: Annotated[int, typer.Option(help="number of GEMMs, one stage each")] = 2,
    m: Annotated[
        int | None, typer.Option(help="rows of the batch; default 16384 on GPUs, 256 on virtual devices")
    ] = None,
    n: Annotated[int | None, typer.Option(help="columns of every layer's output; default 8192, or 128")] = None,
    k: Annotated[int | None, typer.Option(help="columns of the input; default 8192, or 128")] = None,
    dtype: Annotated[str, typer.Option(help="bf16 or fp16")] = "bf16",
    devices: Annotated[
        str, typer.Option(help="devices to use, as in 0,1; default: all, or a virtual one per layer")
    ] = "",
    placement: Annotated[
        str,
        typer.Option(
            help="pipelined (a layer per device, or equal SM shares), or a device per layer: 0:66,0:66,1:66,1:66"
        ),
    ] = "pipelined",
    signalling: Annotated[str, typer.Option(help="queue or counter")] = "queue",
    kernel: Annotated[str, typer.Option(help="persistent or classical; default: persistent on GPUs")] = "",
    dependencies: Annotated[str, typer.Option(help="grouped (a counter per row panel) or per-tile")] = "grouped",
    backend: Annotated[
        str, typer.Option(help="cuda or cpu (virtual devices); default: cuda where there is a GPU")
    ] = "",
    graph: Annotated[bool, typer.Option(help="replay a CUDA graph instead of launching from Python")] = True,
    repeat: Annotated[int, typer.Option(help="timed runs")] = 10,
    timeout: Annotated[float, typer.Option(help="deadline of every wait, seconds")] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object instead of a table")] = False,
) -> None:
    """Run a chain of GEMMs as a pipeline and compare it with the same kernels run layer by layer."""
    import torch

    backend = backend or ("cuda" if torch.cuda.is_available() else "cpu")
    if backend not in SIZES:
        raise InvalidInput(f"unknown backend {backend!r}; choose cuda or cpu")
    if repeat < 1:
        raise InvalidInput(f"--repeat {repeat}: at least one run must be timed")
    if dependencies not in ("grouped", "per-tile"):
        raise InvalidInput(f"unknown dependencies {dependencies!r}; choose grouped or per-tile")
    size = {key: SIZES[backend][key] if value is None else value for key, value in (("m", m), ("n", n), ("k", k))}
    kernel = kernel or ("persistent" if backend == "cuda" else "classical")
    workload = gemm_chain(layers, **size, dtype=dtype, tile=_tile(backend, kernel), grouped=dependencies == "grouped")
    placed = _placement(placement, devices, layers, backend)
    record = measure(
        workload,
        placed,
        backend=backend,
        signalling=signalling,
        kernel=kernel,
        graph=graph,
        repeat=repeat,
        timeout_s=timeout,
    )
    record |= {"layers": layers, "dependencies": dependencies, **size}
    if as_json:
        print(json.dumps(record))
    else:
        _print(record)


def _tile(backend: str, kernel: str) -> tuple[int, int]:
    from tilerelay.kernels.config import DEFAULT_TILE

    return VIRTUAL_TILE if backend == "cpu" else DEFAULT_TILE.get(kernel, (128, 256))


def _placement(text: str, devices: str, layers: int, backend: str) -> Placement:
    if text != "pipelined":
        if devices:
            raise InvalidInput("--devices goes with --placement pipelined; a placement names its devices itself")
        return Placement.parse(text)
    chosen = _device_list(devices, layers, backend)
    if backend == "cpu" or len(chosen) >= layers:
        return pipelined(chosen[:layers] if len(chosen) >= layers else chosen)
    import torch

    from tilerelay.runtime.cuda import check_machine

    check_machine(chosen)
    sms = min(torch.cuda.get_device_properties(d).multi_processor_count for d in chosen)
    return shared(layers, chosen, sms)


def _device_list(devices: str, layers: int, backend: str) -> list[int]:
    if devices:
        try:
            return [int(d) for d in devices.split(",")]
        except ValueError:
            raise InvalidInput(f"--devices {devices!r} is not of the form 0,1") from None
    if backend == "cpu":
        return list(range(layers))
    import torch

    return list(range(torch.cuda.device_count()))


def measure(
    workload: Workload,
    placement: Placement,
    *,
    backend: str,
    signalling: str,
    kernel: str,
    graph: bool,
    repeat: int,
    timeout_s: float,
) -> dict[str, Any]:
    """Build the pipeline on random data, compare it with the oracle and with fp32, and time it.

    Returns:
        What ran, whether it was right, and how long it took (see `tilerelay run --json`).

    Raises:
        TilerelayError: anything that the pipeline refuses, or an aborted run.
    """
    import torch

    from tilerelay.runtime.oracle import TORCH_DTYPES
    from tilerelay.runtime.pipeline import Pipeline

    if len(placement.stages) != len(workload.stages):
        raise InvalidInput(
            f"{len(placement.stages)} devices for {len(workload.stages)} layers; give one for each, or SM shares"
        )
    torch.manual_seed(0)
    dtype = TORCH_DTYPES[workload.dtype]
    where = ["cpu" if backend == "cpu" else f"cuda:{placement.device_of(i)}" for i in range(len(workload.stages))]
    if backend == "cuda":
        from tilerelay.runtime.cuda import check_machine

        check_machine(placement.devices)
    weights = [
        (torch.randn(s.grid.n, s.k, device=d) / s.k**0.5).to(dtype) for s, d in zip(workload.stages, where, strict=True)
    ]
    x = torch.randn(workload.stages[0].grid.m, workload.stages[0].k, device=where[0]).to(dtype)
    with Pipeline(
        workload,
        weights,
        placement=placement,
        signalling=signalling,
        kernel=kernel,
        backend=backend,
        timeout_s=timeout_s,
    ) as pipe:
        y = _poisoned_run(pipe, x)
        record: dict[str, Any] = pipe.describe() | {"dtype": workload.dtype, "tiles": workload.tiles}
        record["bit_equal"] = bool(torch.equal(pipe.oracle(x)[-1].to(y.device), y))
        record["max_rel_err_fp32"] = _relative_error(y, x, weights)
        record["timing"] = "wall clock" if backend == "cpu" else ("CUDA graph" if graph else "eager launches")
        times = [_time_us(pipe, x, call) for call in track(_calls(pipe, x, graph, repeat), repeat, "timing")]
    record["latency_us"] = {"median": statistics.median(times), "min": min(times), "max": max(times)}
    record["repeats"] = repeat
    return record


def _poisoned_run(pipe: Pipeline, x: torch.Tensor) -> torch.Tensor:
    """One run after filling all outputs with NaN, so that nothing left unwritten goes unseen."""
    for tensor in (*pipe.intermediates, pipe.y):
        tensor.fill_(float("nan"))
    pipe.synchronize()
    y = pipe(x)
    pipe.synchronize()
    return y.clone()


def _relative_error(y: torch.Tensor, x: torch.Tensor, weights: list[torch.Tensor]) -> float:
    """max |y - r| / max |r|, r being the chain in fp32 with no rounding between the layers."""
    r = x.float()
    for weight in weights:
        r = r @ weight.to(r.device).float().T
    return float((y.to(r.device).float() - r).abs().max() / r.abs().max())


def _calls(pipe: Pipeline, x: torch.Tensor, graph: bool, repeat: int) -> list[Callable[[], object]]:
    if pipe.backend == "cpu" or not graph:
        return [lambda: pipe(x)] * repeat
    return [pipe.capture(x).replay] * repeat


def _time_us(pipe: Pipeline, x: torch.Tensor, call: Callable[[], object]) -> float:
    import torch

    if pipe.backend == "cpu":
        began = time.perf_counter()
        call()
        return (time.perf_counter() - began) * 1e6
    with torch.cuda.device(x.device):
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
