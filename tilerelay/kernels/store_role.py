"""The store role of the persistent GEMM: a tile's way from shared memory to everywhere that keeps it, and the epilogue.

One warp. It takes the tile's parts from the math roles as they come (`c_ready`), hands their buffers back (`c_empty`),
and runs behind the math: what it waits for hides under the next tile's products.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from tilerelay.kernels.handover import piece_of, tickets_after
from tilerelay.kernels.protocol import (
    ORDER,
    QUEUE,
    await_turn,
    epilogue,
    leave,
    load_numbers,
    tile_before,
    tile_of,
)
from tilerelay.kernels.relay import IN_TURN, RELAY, RELAY_BUT_LAST, relay_tile
from tilerelay.kernels.sync import bulk_stores_complete, load_uniform


@gluon.jit
def corner_of(
    tile, part, group, numbers,
    ROWS: gl.constexpr, BLOCK_N: gl.constexpr, STORE_N: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """(first row, first column) of a warpgroup's rows of a part of a tile."""
    row = (tile // numbers.tiles_n * GROUPS + group) * ROWS
    return row, tile % numbers.tiles_n * BLOCK_N + part * STORE_N


@gluon.jit
def store_tile(
    c_descs, buffers, segment, numbers, ticket, epoch, c_use, goes_on, BLOCK_N: gl.constexpr,
    HOOKS: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """Store a tile as it comes from the math roles, by bulk stores or a relay."""
    ROWS: gl.constexpr = buffers.c.shape[1]
    STORE_N: gl.constexpr = buffers.c.shape[2]
    STORE_BUFFERS: gl.constexpr = buffers.c.shape[0] // GROUPS
    # The last copy that has a descriptor: the device's own where it keeps one.
    LAST_COPY: gl.constexpr = 0 if HOOKS.way == RELAY else HOOKS.copies - 1
    relayed = goes_on if HOOKS.way == RELAY_BUT_LAST else HOOKS.way == RELAY
    for part in gl.static_range(BLOCK_N // STORE_N):
        for group in gl.static_range(GROUPS):
            c_slot = group * STORE_BUFFERS + (c_use + part) % STORE_BUFFERS
            mbarrier.wait(buffers.c_ready.index(c_slot), (c_use + part) // STORE_BUFFERS & 1)
            # Only now has this ticket's prologue certainly run (load -> mma -> here).
            tile = tile_of(ticket, epoch, segment, numbers, HOOKS.source)
            row, col = corner_of(tile, part, group, numbers, ROWS, BLOCK_N, STORE_N, GROUPS)
            if not relayed:
                for copy in gl.static_range(LAST_COPY):
                    tma.async_copy_shared_to_global(c_descs[copy], [row, col], buffers.c.index(c_slot))
            tma.async_copy_shared_to_global(c_descs[LAST_COPY], [row, col], buffers.c.index(c_slot))
            tma.store_wait(0)  # the buffer has been read: enough to hand it back, not enough to publish
            mbarrier.arrive(buffers.c_empty.index(c_slot), count=1)
    if HOOKS.way == RELAY or HOOKS.way == RELAY_BUT_LAST:
        if relayed:
            row = tile // numbers.tiles_n * (GROUPS * ROWS)
            col = tile % numbers.tiles_n * BLOCK_N
            relay_tile(c_descs[LAST_COPY], segment.relay, row, col, GROUPS * ROWS, BLOCK_N, HOOKS.copies - 1)
    return tile


@gluon.jit
def store_tile_in_turn(
    c_descs, buffers, segment, numbers, ticket, epoch, c_use, lanes, words, timeout_us, BLOCK_N: gl.constexpr,
    HOOKS: gl.constexpr, STRIDE: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """Keep the own copy of a tile, and announce it here; then send the others when it is the tile's turn."""
    ROWS: gl.constexpr = buffers.c.shape[1]
    STORE_N: gl.constexpr = buffers.c.shape[2]
    STORE_BUFFERS: gl.constexpr = buffers.c.shape[0] // GROUPS
    PARTS: gl.constexpr = BLOCK_N // STORE_N
    OTHERS: gl.constexpr = HOOKS.copies - 1 if HOOKS.kept else HOOKS.copies
    gl.static_assert(HOOKS.source != QUEUE, "a queue's order is not known beforehand")
    gl.static_assert(PARTS <= STORE_BUFFERS, "the store role would wait for a buffer that it holds")
    tile = tile_of(ticket, epoch, segment, numbers, HOOKS.source)
    before = tile_before(ticket, segment.control, numbers)
    for part in gl.static_range(PARTS):
        for group in gl.static_range(GROUPS):
            c_slot = group * STORE_BUFFERS + (c_use + part) % STORE_BUFFERS
            mbarrier.wait(buffers.c_ready.index(c_slot), (c_use + part) // STORE_BUFFERS & 1)
            if HOOKS.kept:
                row, col = corner_of(tile, part, group, numbers, ROWS, BLOCK_N, STORE_N, GROUPS)
                tma.async_copy_shared_to_global(c_descs[OTHERS], [row, col], buffers.c.index(c_slot))
    if HOOKS.kept:
        alive = load_uniform(segment.control.abort) == 0
        epilogue(tile, epoch, alive, lanes, segment, numbers, 0, 1, HOOKS, STRIDE)
    await_turn(ticket, tile, before, epoch, segment, numbers, words, timeout_us)
    for part in gl.static_range(PARTS):
        for group in gl.static_range(GROUPS):
            c_slot = group * STORE_BUFFERS + (c_use + part) % STORE_BUFFERS
            row, col = corner_of(tile, part, group, numbers, ROWS, BLOCK_N, STORE_N, GROUPS)
            for copy in gl.static_range(OTHERS):
                tma.async_copy_shared_to_global(c_descs[copy], [row, col], buffers.c.index(c_slot))
    tma.store_wait(0)  # read: the buffers can be handed back, and the next tile can be sent
    tl.atomic_xchg(segment.control.sent + tile, epoch, sem="relaxed", scope="gpu")
    for part in gl.static_range(PARTS):
        for group in gl.static_range(GROUPS):
            c_slot = group * STORE_BUFFERS + (c_use + part) % STORE_BUFFERS
            mbarrier.arrive(buffers.c_empty.index(c_slot), count=1)
    return tile


@gluon.jit
def store_segment(
    c_descs, buffers, segment, first, c_use, words, timeout_us, BLOCK_N: gl.constexpr,
    HOOKS: gl.constexpr, STRIDE: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    # Leaving takes a microsecond. Where only this role reads the epoch it may leave at once, else after its first tile:
    # by then (load -> mma -> here) the others have read it.
    READS_ALONE: gl.constexpr = HOOKS.source == ORDER and segment.handover is None
    # Who is told of a tile after it is sent: all, but for a reader here.
    FIRST: gl.constexpr = 1 if HOOKS.kept else 0
    END: gl.constexpr = HOOKS.readers
    lanes = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    numbers = load_numbers(segment.control)
    epoch = gl.load(segment.control.epoch)
    left = READS_ALONE
    if READS_ALONE:
        leave(segment.control, epoch)
    for ticket in range(first, numbers.tickets, gl.num_programs(0)):
        _, end, _ = piece_of(ticket, segment, numbers)
        if end == numbers.k:
            if HOOKS.way == IN_TURN:
                tile = store_tile_in_turn(
                    c_descs, buffers, segment, numbers, ticket, epoch, c_use, lanes, words, timeout_us, BLOCK_N,
                    HOOKS, STRIDE, GROUPS,
                )  # fmt: skip
            else:
                goes_on = ticket + gl.num_programs(0) < numbers.tickets
                tile = store_tile(
                    c_descs, buffers, segment, numbers, ticket, epoch, c_use, goes_on, BLOCK_N, HOOKS, GROUPS
                )
            c_use += BLOCK_N // buffers.c.shape[2]
            alive = load_uniform(segment.control.abort) == 0
            epilogue(tile, epoch, alive, lanes, segment, numbers, FIRST, END, HOOKS, STRIDE)
            if not left:
                leave(segment.control, epoch)
                left = True
    if not left:
        leave(segment.control, epoch)
    return tickets_after(first, numbers.tickets), c_use


@gluon.jit
def store_role(
    c_descs, buffers, segments, words, timeout_us,
    BLOCK_N: gl.constexpr, HOOKS: gl.constexpr, STRIDE: gl.constexpr, SEGMENTS: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    first = gl.program_id(0)
    c_use = 0
    for s in gl.static_range(SEGMENTS):
        first, c_use = store_segment(
            c_descs[s], buffers, segments[s], first, c_use, words, timeout_us, BLOCK_N, HOOKS[s], STRIDE, GROUPS
        )
    bulk_stores_complete()
