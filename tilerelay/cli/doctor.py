"""`tilerelay doctor`: what this machine can run, and why not."""

from __future__ import annotations

import json
import platform
from importlib.metadata import PackageNotFoundError, version
from itertools import permutations
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tilerelay.errors import TilerelayError

COPY_BYTES = 256 * 1024 * 1024
COPIES = 5


def doctor(as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False) -> None:
    """Report GPUs, peer access and its measured bandwidth, versions, and what can be run here."""
    report = inspect_machine()
    if as_json:
        print(json.dumps(report))
        return
    console = Console()
    console.print(_table("machine", [(k, str(v)) for k, v in report["versions"].items()]))
    console.print(
        _table(
            "GPUs",
            [(f"cuda:{g['device']}", f"{g['name']}, {g['sms']} SMs, {g['memory_gib']} GiB") for g in report["gpus"]],
        )
    )
    console.print(
        _table("peers", [(p["pair"], p["problem"] or f"{p['gb_per_second']:.0f} GB/s") for p in report["peers"]])
    )
    console.print(_table("can run", [(k, "yes" if not v else f"no: {v}") for k, v in report["can_run"].items()]))


def inspect_machine() -> dict[str, Any]:
    """Versions, GPUs, peers with their bandwidth in GB/s, and for each way to run: None, or the reason why not."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = []
    for device in range(count):
        p = torch.cuda.get_device_properties(device)
        gpus.append(
            {
                "device": device,
                "name": p.name,
                "sms": p.multi_processor_count,
                "memory_gib": p.total_memory >> 30,
                "compute_capability": f"{p.major}.{p.minor}",
            }
        )
    peers = [_peer(a, b) for a, b in permutations(range(count), 2)]
    return {"versions": _versions(), "gpus": gpus, "peers": peers, "can_run": _can_run(count, peers)}


def _versions() -> dict[str, str | None]:
    import torch

    def installed(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    return {
        "python": platform.python_version(),
        "tilerelay": installed("tilerelay"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver": _driver(),
        "triton": installed("triton"),
        "numpy": installed("numpy"),
    }


def _driver() -> str | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception:  # no NVML module or no driver: both mean that there is none to report
        return None


def _peer(source: int, target: int) -> dict[str, Any]:
    """Whether `source` can write `target`'s memory, proven by a write, and how fast it copies there."""
    import torch

    from tilerelay.runtime.cuda import open_peers

    pair = f"{source} -> {target}"
    try:
        open_peers([source, target])
    except TilerelayError as error:
        return {"pair": pair, "gb_per_second": None, "problem": str(error)}
    with torch.cuda.device(source):
        data = torch.empty(COPY_BYTES, dtype=torch.uint8, device=f"cuda:{source}")
        copy = torch.empty(COPY_BYTES, dtype=torch.uint8, device=f"cuda:{target}")
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        copy.copy_(data)
        begin.record()
        for _ in range(COPIES):
            copy.copy_(data)
        end.record()
        torch.cuda.synchronize(source)
    return {"pair": pair, "gb_per_second": COPIES * COPY_BYTES / begin.elapsed_time(end) / 1e6, "problem": None}


def _can_run(count: int, peers: list[dict[str, Any]]) -> dict[str, str | None]:
    from tilerelay.runtime.cuda import check_machine

    try:
        check_machine(range(max(1, count)))
        one_gpu = None
    except TilerelayError as error:
        one_gpu = str(error)
    several = one_gpu or (None if count > 1 else "one GPU; stages can share its SMs")
    broken = next((p["problem"] for p in peers if p["problem"]), None)
    return {"virtual devices": None, "one GPU": one_gpu, "several GPUs": several or broken}


def _table(title: str, rows: list[tuple[str, str]]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    for row in rows or [("none", "")]:
        table.add_row(*row)
    return table
