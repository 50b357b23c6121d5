"""Compiled kernel variants, each compiled once in a test process."""

from __future__ import annotations

from functools import cache

from tilerelay.kernels.compile import CompiledGemm, compile_gemm
from tilerelay.kernels.config import KERNELS, configure
from tilerelay.kernels.protocol import COUNT, COUNTER, ORDER, PUSH, QUEUE, SILENT

SOURCES = {"order": ORDER.value, "queue": QUEUE.value, "counter": COUNTER.value}
SIGNALS = {"silent": SILENT.value, "push": PUSH.value, "count": COUNT.value}

# (signal, entries name groups); only pushes know entries.
ANNOUNCEMENTS = [("silent", True), ("push", True), ("push", False), ("count", True)]
TILES = [(m, n) for m in (64, 128, 256) for n in (32, 64, 128, 256) if m * n <= 128 * 256]

__all__ = ["ANNOUNCEMENTS", "KERNELS", "SIGNALS", "SOURCES", "TILES", "compiled"]


@cache
def compiled(
    kind: str,
    source: str,
    signal: str,
    *,
    group_entries: bool = True,
    tile: tuple[int, int] = (128, 256),
    dtype: str = "bf16",
    bias: bool = False,
    activation: str = "none",
    stamps: bool = False,
    stride: int = 1,
) -> CompiledGemm:
    return compile_gemm(
        configure(kind, tile),
        source=SOURCES[source],
        signal=SIGNALS[signal],
        group_entries=group_entries,
        dtype=dtype,
        bias=bias,
        activation=activation,
        stamps=stamps,
        stride=stride,
    )
