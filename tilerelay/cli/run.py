"""`tilerelay run`: one chain of GEMMs as a pipeline, checked against the layer-by-layer result, and timed."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tilerelay.cli.progress import track
from tilerelay.errors import InvalidInput, UnsupportedMachine
from tilerelay.graph.catalog import gemm_chain
from tilerelay.graph.choice import choose
from tilerelay.graph.placement import Placement, pipelined, sharded, shared
from tilerelay.graph.workload import Workload

if TYPE_CHECKING:
    import torch

    from tilerelay.runtime.pipeline import Pipeline

# The paper's size on GPUs; on virtual devices, what an interpreter does in seconds.
SIZES = {"cuda": {"m": 16384, "n": 8192, "k": 8192}, "cpu": {"m": 256, "n": 128, "k": 128}}
VIRTUAL_TILE = (64, 64)
SLOW_S = 20.0


def run(
    layers: Annotated[int, typer.Option(min=1, max=64, help="number of GEMMs, one stage each")] = 2,
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
            help="pipelined (a layer per device, or equal SM shares), sharded (every layer cut over all devices), "
            "auto, or a device per layer: 0:66,0:66,1:66,1:66"
        ),
    ] = "pipelined",
    replicate: Annotated[bool, typer.Option(help="sharded: the whole output on every device")] = False,
    signalling: Annotated[str, typer.Option(help="queue or counter; default: queue, sharded: counter")] = "",
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
    placed, tile, why = _place(placement, devices, layers, size, backend, kernel)
    workload = gemm_chain(layers, **size, dtype=dtype, tile=tile, grouped=dependencies == "grouped")
    options = {"signalling": signalling or None, "kernel": kernel, "timeout_s": timeout, "replicate": replicate}
    record = measure(workload, placed, backend=backend, graph=graph, repeat=repeat, **options)
    record |= {"layers": layers, "dependencies": dependencies, **size} | ({"choice": why} if why else {})
    if as_json:
        print(json.dumps(record))
    else:
        _print(record)


def _place(
    text: str, devices: str, layers: int, size: dict[str, int], backend: str, kernel: str
) -> tuple[Placement, tuple[int, int], str | None]:
    """Placement, tile shape, and for `auto` the reason."""
    from tilerelay.kernels.config import DEFAULT_TILE

    tile = VIRTUAL_TILE if backend == "cpu" else DEFAULT_TILE.get(kernel, (128, 256))
    if text not in ("pipelined", "sharded", "auto"):
        if devices:
            raise InvalidInput("--devices goes with a placement's kind; a placement names its devices itself")
        return Placement.parse(text), tile, None
    chosen = _device_list(devices, layers, backend)
    widths = [size["k"]] + [size["n"]] * layers
    if text == "sharded":
        return sharded(widths[1:], chosen), tile, None
    if text == "auto":
        from tilerelay.runtime.cuda import check_machine

        sms = {} if backend == "cpu" else {"sms": min(check_machine(chosen).values())}
        choice = choose(size["m"], widths, chosen, **sms)
        return choice.placement, tile if backend == "cpu" else choice.tile, str(choice)
    if backend == "cpu" or len(chosen) >= layers:
        return pipelined(chosen[:layers] if len(chosen) >= layers else chosen), tile, None
    from tilerelay.runtime.cuda import check_machine

    return shared(layers, chosen, min(check_machine(chosen).values())), tile, None


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
    workload: Workload, placement: Placement, *, backend: str, graph: bool, repeat: int, **options: Any
) -> dict[str, Any]:
    """Build the pipeline on random data, compare it with the oracle and with fp32, and time it.

    Args:
        options: of the pipeline.

    Returns:
        What ran, whether it was right, and how long it took (see `tilerelay run --json`).

    Raises:
        TilerelayError: anything that the pipeline refuses, or an aborted run.
    """
    import torch

    from tilerelay.runtime.cuda import check_machine
    from tilerelay.runtime.oracle import TORCH_DTYPES
    from tilerelay.runtime.pipeline import Pipeline

    if len(placement.stages) != len(workload.stages):
        raise InvalidInput(
            f"{len(placement.stages)} devices for {len(workload.stages)} layers; give one for each, or SM shares"
        )
    if backend == "cuda":
        check_machine(placement.devices)
    _check_memory(workload, backend)
    if backend == "cpu" and (seconds := _interpreted_s(workload)) > SLOW_S:
        print(f"tilerelay: virtual devices interpret every tile: about {seconds:.0f} s a run", file=sys.stderr)
    torch.manual_seed(0)
    dtype = TORCH_DTYPES[workload.dtype]
    homes = [parts[0].device for parts in placement.stages]
    where = ["cpu" if backend == "cpu" else f"cuda:{home}" for home in homes]
    weights = [
        (torch.randn(s.grid.n, s.k, device=d) / s.k**0.5).to(dtype) for s, d in zip(workload.stages, where, strict=True)
    ]
    first = workload.stages[0]
    x = torch.randn(first.grid.m, first.k, device=where[0]).to(dtype)
    inputs = [x if backend == "cpu" else x.to(f"cuda:{part.device}") for part in placement.stages[0]]
    with Pipeline(workload, weights, placement=placement, backend=backend, **options) as pipe:
        y = _poisoned_run(pipe, inputs)
        record: dict[str, Any] = pipe.describe() | {"dtype": workload.dtype, "tiles": workload.tiles}
        expected = pipe.oracle(x)[-1]
        record["bit_equal"] = all(bool(torch.equal(expected, whole)) for whole in y)
        record["max_rel_err_fp32"] = _relative_error(y[0], x, weights)
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


def _check_memory(workload: Workload, backend: str) -> None:
    """Raises UnsupportedMachine: the operands alone would not fit."""
    import torch

    elements = workload.stages[0].grid.m * workload.stages[0].k
    elements += sum(s.grid.n * s.k + 2 * s.grid.m * s.grid.n for s in workload.stages)
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if backend == "cuda":
        free = sum(torch.cuda.mem_get_info(device)[0] for device in range(torch.cuda.device_count()))
    if 2 * elements > free:
        raise UnsupportedMachine(
            f"the operands take {2 * elements / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free; choose smaller sizes"
        )


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
