"""Synchronisation primitives of the device code, each with its precondition and the ordering that it gives.

The rules are those of docs/protocol.md, after the PTX memory model (PTX ISA, "Memory Consistency Model"). The same
functions run compiled for the GPU and, on machines without one, under Triton's interpreter; what has no meaning
there (proxies, fences: the interpreter's atomics are sequentially consistent) compiles to nothing.
"""

import os
import time

import triton
import triton.language as tl
from triton.language.core import to_tensor

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")

# A waiting thread looks at the clock and at the abort word once in so many polls.
POLLS_PER_CHECK = tl.constexpr(1 if INTERPRETED.value else 64)


@triton.jit
def _asm(code: tl.constexpr):
    """Run one PTX statement in every thread; it may not be moved or dropped."""
    tl.inline_asm_elementwise(code + " mov.u32 $0, $1;", "=r,r", [to_tensor(0)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _global_timer():
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


def _host_clock():
    time.sleep(50e-6)  # give the core to the processes that this one waits for
    return tl.cast(time.monotonic_ns(), tl.int64)


# Nanoseconds of a clock that all SMs of a device share.
clock_ns = _host_clock if INTERPRETED else _global_timer


@triton.jit
def fence_system():
    """`fence.acq_rel.sys`: what this thread wrote or observed is visible system-wide before what it writes next."""
    if not INTERPRETED:
        _asm("fence.acq_rel.sys;")


@triton.jit
def fence_proxy():
    """`fence.proxy.async`: this thread's next TMA loads see what it observed before by ordinary loads (rule 4)."""
    if not INTERPRETED:
        _asm("fence.proxy.async;")


@triton.jit
def bulk_stores_complete():
    """`cp.async.bulk.wait_group 0`: the bulk stores that this thread issued are written, not only read (rule 1)."""
    if not INTERPRETED:
        _asm("cp.async.bulk.wait_group 0;")


@triton.jit
def load_acquire(pointer, zero=0, mask=None):
    """Acquire load at system scope (`ld.acquire.sys`): later reads see what the releasing thread had published.

    Of several pointers, one for each thread of a warp, with as many zeros, under a mask: an atomic add.
    """
    return tl.atomic_add(pointer, zero, mask=mask, sem="acquire", scope="sys")


@triton.jit
def load_uniform(pointer):
    """A word that others may be changing: one thread reads it, all threads of the role get the same value."""
    return tl.atomic_add(pointer, 0, sem="relaxed", scope="sys")


@triton.jit
def barrier():
    """All threads of this CTA, or of this warp-specialised role, have come here; their writes before are ordered."""
    if not INTERPRETED:
        tl.debug_barrier()


@triton.jit
def stamp(stamps, tile, EVENT: tl.constexpr, EVENTS: tl.constexpr, happens=True):
    """Note the time of an event of a tile; nothing at all, not an instruction, when `stamps` is None.

    Under a mask, not a branch, where it does not always happen: see `handover.take_over`.
    """
    if stamps is not None:
        tl.store(stamps + tile * EVENTS + EVENT, clock_ns(), mask=happens)
