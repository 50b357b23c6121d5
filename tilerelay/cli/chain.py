"""The chain of GEMMs that `tilerelay run` and `tilerelay trace run` make from the same options."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from tilerelay.errors import InvalidInput, UnsupportedMachine
from tilerelay.graph.catalog import gemm_chain
from tilerelay.graph.choice import KINDS, choose
from tilerelay.graph.placement import Placement, pipelined, sharded, shared
from tilerelay.graph.workload import Workload

if TYPE_CHECKING:
    import torch

# The paper's size on GPUs; on virtual devices, what an interpreter does in seconds.
SIZES = {"cuda": {"m": 16384, "n": 8192, "k": 8192}, "cpu": {"m": 256, "n": 128, "k": 128}}
VIRTUAL_TILE = (64, 64)

Layers = Annotated[int, typer.Option(min=1, max=64, help="number of GEMMs, one stage each")]
M = Annotated[int | None, typer.Option(help="rows of the batch; default 16384 on GPUs, 256 on virtual devices")]
N = Annotated[int | None, typer.Option(help="columns of every layer's output; default 8192, or 128")]
K = Annotated[int | None, typer.Option(help="columns of the input; default 8192, or 128")]
Dtype = Annotated[str, typer.Option(help="bf16 or fp16")]
Devices = Annotated[str, typer.Option(help="devices to use, as in 0,1; default: all, or a virtual one per layer")]
Placed = Annotated[
    str,
    typer.Option(
        help="pipelined (a layer per device, or equal SM shares), sharded (every layer cut over all devices), "
        "auto, or a device per layer: 0:66,0:66,1:66,1:66"
    ),
]
Signalling = Annotated[str, typer.Option(help="queue or counter; default: counter")]
Kernel = Annotated[str, typer.Option(help="persistent or classical; default: persistent on GPUs")]
Backend = Annotated[str, typer.Option(help="cuda or cpu (virtual devices); default: cuda where there is a GPU")]
Graph = Annotated[bool, typer.Option(help="replay a CUDA graph instead of launching from Python")]
Timeout = Annotated[float, typer.Option(help="deadline of every wait, seconds")]


class Chain(NamedTuple):
    """What the options ask for. `why`: the reason for an `auto` placement."""

    workload: Workload
    placement: Placement
    backend: str
    kernel: str
    size: dict[str, int]
    why: str | None


def make_chain(
    layers: int,
    m: int | None,
    n: int | None,
    k: int | None,
    *,
    dtype: str,
    devices: str,
    placement: str,
    kernel: str,
    backend: str,
    grouped: bool = True,
) -> Chain:
    """The chain, with a default for everything that is None or empty.

    Raises:
        InvalidInput, PlacementError, UnsupportedMachine: the options contradict each other or the machine.
    """
    import torch

    backend = backend or ("cuda" if torch.cuda.is_available() else "cpu")
    if backend not in SIZES:
        raise InvalidInput(f"unknown backend {backend!r}; choose cuda or cpu")
    size = {key: SIZES[backend][key] if value is None else value for key, value in (("m", m), ("n", n), ("k", k))}
    kernel = kernel or ("persistent" if backend == "cuda" else "classical")
    placed, tile, why = _place(placement, devices, layers, size, backend, kernel)
    workload = gemm_chain(layers, **size, dtype=dtype, tile=tile, grouped=grouped)
    if len(placed.stages) != layers:
        raise InvalidInput(f"{len(placed.stages)} devices for {layers} layers; give one for each, or SM shares")
    if backend == "cuda":
        from tilerelay.runtime.cuda import check_machine

        check_machine(placed.devices)
    _check_memory(workload, backend)
    return Chain(workload, placed, backend, kernel, size, why)


def operands(chain: Chain) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Random weights [N, K], each on its stage's first device; the input [M, K] on every device of the first stage."""
    import torch

    from tilerelay.runtime.oracle import TORCH_DTYPES

    torch.manual_seed(0)
    stages, dtype = chain.workload.stages, TORCH_DTYPES[chain.workload.dtype]
    where = [["cpu" if chain.backend == "cpu" else f"cuda:{p.device}" for p in ps] for ps in chain.placement.stages]
    weights = [
        (torch.randn(s.grid.n, s.k, device=homes[0]) / s.k**0.5).to(dtype)
        for s, homes in zip(stages, where, strict=True)
    ]
    x = torch.randn(stages[0].grid.m, stages[0].k, device=where[0][0]).to(dtype)
    return weights, [x.to(home) for home in where[0]]


def _place(
    text: str, devices: str, layers: int, size: dict[str, int], backend: str, kernel: str
) -> tuple[Placement, tuple[int, int], str | None]:
    """Placement, tile shape, and the reason where the cost model was asked: for `auto`, for the tile of `sharded`."""
    from tilerelay.kernels.config import DEFAULT_TILE

    tile = VIRTUAL_TILE if backend == "cpu" else DEFAULT_TILE.get(kernel, (128, 256))
    if text not in ("pipelined", "sharded", "auto"):
        if devices:
            raise InvalidInput("--devices goes with a placement's kind; a placement names its devices itself")
        return Placement.parse(text), tile, None
    chosen = _device_list(devices, layers, backend)
    widths = [size["k"]] + [size["n"]] * layers
    if text == "sharded" and (backend == "cpu" or kernel == "classical" or len(chosen) == 1):
        return sharded(widths[1:], chosen), tile, None
    if text in ("auto", "sharded"):
        from tilerelay.runtime.cuda import check_machine

        sms = {} if backend == "cpu" else {"sms": min(check_machine(chosen).values())}
        choice = choose(size["m"], widths, chosen, kinds=KINDS if text == "auto" else [text], **sms)
        if backend == "cpu":
            reason = f"{choice}; modelled for H200 GPUs, virtual devices take tiles of {tile[0]} x {tile[1]}"
            return choice.placement, tile, reason
        return choice.placement, choice.tile, str(choice)
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
