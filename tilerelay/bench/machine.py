"""The machine's facts that go into every results file."""

from __future__ import annotations

import hashlib
import platform
import subprocess
from typing import Any


def query_gpus(*names: str) -> list[list[str]]:
    """One row per GPU from nvidia-smi; no rows when it is missing or fails."""
    command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode:
        return []
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]


def host_of(uuids: list[str]) -> str:
    """Eight letters that stay the same on one host and tell two hosts with the same GPUs apart."""
    return hashlib.sha256("".join(sorted(uuids)).encode()).hexdigest()[:8]


def facts(commit: str | None) -> dict[str, Any]:
    """GPU model and number, driver, versions, limits, and the commit that the caller passes in."""
    import torch
    import triton

    rows = query_gpus("uuid", "driver_version", "power.limit", "clocks.max.sm")
    gpus = torch.cuda.device_count()
    first = rows[0] if rows else ["", "", "", ""]
    return {
        "gpu": torch.cuda.get_device_name(0) if gpus else "none",
        "gpus": gpus,
        "host": host_of([row[0] for row in rows]),
        "driver": first[1],
        "power_limit_w": first[2],
        "max_sm_clock_mhz": first[3],
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpus else None,  # type: ignore[no-untyped-call]
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "commit": commit,
    }
