"""Compiled kernel variants, each compiled once in a test process."""

from __future__ import annotations

from functools import cache

from tilerelay.kernels.compile import CompiledGemm, compile_gemm
from tilerelay.kernels.config import KERNELS, configure
from tilerelay.kernels.protocol import COUNT, COUNTER, ORDER, PUSH, QUEUE, SILENT, Hooks
from tilerelay.kernels.relay import AT_ONCE, BULK, IN_TURN, RELAY, RELAY_BUT_LAST, WORD

SOURCES = {"order": ORDER.value, "queue": QUEUE.value, "counter": COUNTER.value}
SIGNALS = {"silent": SILENT.value, "push": PUSH.value, "count": COUNT.value}
WAYS = {"bulk": BULK.value, "relay": RELAY.value, "relay but last": RELAY_BUT_LAST.value, "in turn": IN_TURN.value}

# (signal, entries name groups); only pushes know entries.
ANNOUNCEMENTS = [("silent", True), ("push", True), ("push", False), ("count", True)]
TILES = [(m, n) for m in (64, 128, 256) for n in (32, 64, 128, 256) if m * n <= 128 * 256]
TILE = (128, 256)

__all__ = [
    "ANNOUNCEMENTS", "KERNELS", "LOADS", "SEVERAL", "SIGNALS", "SOURCES", "STORES", "TILE", "TILES", "WAYS",
    "compiled", "hooks",
]  # fmt: skip


def hooks(
    source: str,
    signal: str,
    *,
    group_entries: bool = True,
    readers: int = 1,
    copies: int = 1,
    way: str = "bulk",
    in_steps: bool = False,
    kept: bool = False,
) -> Hooks:
    """A segment's hooks, by the words' names; a silent one has no readers."""
    readers = 0 if signal == "silent" else readers
    return Hooks(SOURCES[source], SIGNALS[signal], group_entries, readers, copies, WAYS[way], in_steps, kept)


# The instructions that store a tile in one place: each takes a swizzled row of 128 bytes of a warpgroup's rows.
STORES = TILE[1] // 64 * configure("persistent", TILE).warpgroups
# And those that load what a warp relays at once, to be stored to each peer: whatever the tile, a word for each lane.
LOADS = AT_ONCE.value // (32 * 2 * WORD.value)

# Segments of one persistent kernel: what cut stages on two, three and four devices give.
SEVERAL = {
    "a cut output": (hooks("order", "count", readers=2, copies=2), hooks("counter", "silent")),
    "a whole output on both": (hooks("order", "count", readers=2, copies=2), hooks("counter", "silent", copies=2)),
    "three stages": (
        hooks("order", "count", readers=3, copies=3),
        hooks("counter", "count", readers=3, copies=3),
        hooks("counter", "silent"),
    ),
    "four copies": (hooks("order", "count", readers=4, copies=4), hooks("counter", "silent", copies=4)),
    "a relayed cut output": (
        hooks("order", "count", readers=2, copies=2, way="relay"),
        hooks("counter", "silent"),
    ),
    "a relayed whole output on both": (
        hooks("order", "count", readers=2, copies=2, way="relay"),
        hooks("counter", "silent", copies=2, way="relay but last"),
    ),
    "three stages, relayed": (
        hooks("order", "count", readers=3, copies=3, way="relay"),
        hooks("counter", "count", readers=3, copies=3, way="relay"),
        hooks("counter", "silent"),
    ),
    "a cut output, in turn": (
        hooks("order", "count", readers=2, copies=2, way="in turn", kept=True),
        hooks("counter", "silent", in_steps=True),
    ),
    "three stages, in turn": (
        hooks("order", "count", readers=3, copies=3, way="in turn", kept=True),
        hooks("counter", "count", readers=3, copies=3, way="in turn", in_steps=True, kept=True),
        hooks("counter", "silent", copies=3, in_steps=True),
    ),
    "elsewhere, in turn": (
        hooks("order", "count", readers=2, copies=2, way="in turn"),
        hooks("counter", "count", way="in turn", in_steps=True),
    ),
    "four copies, relayed": (
        hooks("order", "count", readers=4, copies=4, way="relay"),
        hooks("counter", "silent", copies=4, way="relay but last"),
    ),
}


@cache
def compiled(
    kind: str,
    *segments: Hooks,
    tile: tuple[int, int] = TILE,
    dtype: str = "bf16",
    bias: bool = False,
    activation: str = "none",
    stamps: bool = False,
    shared: tuple[int, ...] = (),
    stride: int = 1,
) -> CompiledGemm:
    whole_tile = any(segment.way == IN_TURN.value for segment in segments)
    return compile_gemm(
        configure(kind, tile, whole_tile=whole_tile), segments,
        dtype=dtype, bias=bias, activation=activation, stamps=stamps, shared=shared, stride=stride,
    )  # fmt: skip
