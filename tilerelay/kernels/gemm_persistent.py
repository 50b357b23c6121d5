"""Warp-specialised persistent GEMM for Hopper (paper, section III.B.2), in Gluon: one CTA per SM walks over tiles.

`c[M, N] = activation(a[M, K] @ b[N, K].T + bias[N])`, fp32 accumulation. The roles that share an SM:

    load   1 warp          prologue, then TMA loads of A and B blocks into NUM_BUFFERS buffers     ready[i] ->
    mma    a warpgroup or  WGMMA over the K blocks for its rows of the tile, bias, activation,
           two             rounding, into its own c buffer                                         c_ready[j] ->
    store  1 warp          TMA stores of the tile, its way to the peers' memory, then the epilogue

Hand-over is by mbarriers that count uses of a slot: `empty` and `c_empty` go the other way. The load warp runs ahead
of the math by the buffers' depth and the store warp behind it: the protocol's waits hide under the next tile's math.
Warpgroups never wait for each other: while one rounds and stores, the other one multiplies.
All roles take the same tickets, so that every barrier is used equally often, after an abort too.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilerelay.kernels.activation import activate
from tilerelay.kernels.handover import hand_over, piece_of, take_over, tickets_after, wait_for_sum
from tilerelay.kernels.protocol import (
    COMPUTED,
    EVENTS,
    LOADED,
    ORDER,
    await_step,
    load_numbers,
    look_up_steps,
    prologue,
    tile_of,
)
from tilerelay.kernels.store_role import store_role
from tilerelay.kernels.sync import load_uniform, stamp


class Buffers(NamedTuple):
    """Shared memory and its barriers."""

    a: Any  # [NUM_BUFFERS * GROUPS, rows of a warpgroup, BLOCK_K]
    b: Any  # [NUM_BUFFERS, BLOCK_N, BLOCK_K]
    empty: Any
    ready: Any
    c: Any  # [GROUPS * STORE_BUFFERS, rows of a warpgroup, STORE_N]
    c_empty: Any
    c_ready: Any


@gluon.jit
def load_segment(
    a_desc, b_desc, buffers, segment, first, use, words, timeout_us,
    HOOKS: gl.constexpr, STRIDE: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = a_desc.block_type.shape[0]
    BLOCK_N: gl.constexpr = b_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = a_desc.block_type.shape[1]
    NUM_BUFFERS: gl.constexpr = buffers.b.shape[0]
    numbers = load_numbers(segment.control)
    epoch = gl.load(segment.control.epoch)
    WAITS: gl.constexpr = HOOKS.source != ORDER
    alive = load_uniform(segment.control.abort) == 0 if WAITS else gl.to_tensor(True)
    lanes = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    for ticket in range(first, numbers.tickets, gl.num_programs(0)):
        begin, end, _ = piece_of(ticket, segment, numbers)
        if segment.handover is None:
            tile, alive = prologue(ticket, alive, epoch, segment, numbers, words, timeout_us, HOOKS.source, STRIDE)
        else:
            tile = 0
            if begin < end:
                tile, alive = prologue(ticket, alive, epoch, segment, numbers, words, timeout_us, HOOKS.source, STRIDE)
        row = tile // numbers.tiles_n * (GROUPS * ROWS)
        col = tile % numbers.tiles_n * BLOCK_N
        if HOOKS.in_steps:
            steps_ready = 1
            ready_k = gl.load(segment.inbox.steps)
            steps = look_up_steps(tile, lanes, segment, numbers)
        for k in range(begin // BLOCK_K, (end + BLOCK_K - 1) // BLOCK_K):
            if HOOKS.in_steps:
                while k * BLOCK_K >= ready_k:
                    steps_ready, ready_k, alive = await_step(
                        ticket, tile, steps, steps_ready, alive, epoch, lanes, segment, numbers, words, timeout_us,
                        STRIDE,
                    )  # fmt: skip
            slot = use % NUM_BUFFERS
            mbarrier.wait(buffers.empty.index(slot), (use // NUM_BUFFERS & 1) ^ 1)
            ready = buffers.ready.index(slot)
            mbarrier.expect(ready, GROUPS * a_desc.block_type.nbytes + b_desc.block_type.nbytes)
            for group in gl.static_range(GROUPS):
                a = buffers.a.index(slot * GROUPS + group)
                tma.async_copy_global_to_shared(a_desc, [row + group * ROWS, k * BLOCK_K], ready, a)
            tma.async_copy_global_to_shared(b_desc, [col, k * BLOCK_K], ready, buffers.b.index(slot))
            use += 1
    return tickets_after(first, numbers.tickets), use


@gluon.jit
def mma_segment(
    c_dtype: gl.constexpr, buffers, segment, first, use, c_use, words, timeout_us,
    HOOKS: gl.constexpr, ACTIVATION: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = buffers.a.shape[1]
    BLOCK_N: gl.constexpr = buffers.b.shape[1]
    BLOCK_K: gl.constexpr = buffers.a.shape[2]
    NUM_BUFFERS: gl.constexpr = buffers.b.shape[0]
    STORE_BUFFERS: gl.constexpr = buffers.c.shape[0] // GROUPS
    STORE_N: gl.constexpr = buffers.c.shape[2]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    control = segment.control
    numbers = load_numbers(control)
    epoch = gl.load(control.epoch)
    for ticket in range(first, numbers.tickets, gl.num_programs(0)):
        begin, end, place = piece_of(ticket, segment, numbers)
        acc = gl.zeros((ROWS, BLOCK_N), gl.float32, LAYOUT)
        if segment.handover is not None:
            if begin > 0:
                tile = tile_of(ticket, epoch, segment, numbers, HOOKS.source)
                wait_for_sum(segment, place, epoch, words, timeout_us, numbers.stage, ticket, tile, GROUP, GROUPS)
            acc = take_over(acc, segment.handover, place, begin > 0, GROUP, GROUPS)
        if control.stamps is not None:
            mbarrier.wait(buffers.ready.index(use % NUM_BUFFERS), use // NUM_BUFFERS & 1, pred=begin < end)
            tile = tile_of(ticket, epoch, segment, numbers, HOOKS.source)
            stamp(control.stamps, tile, LOADED, EVENTS, begin < end)
        for k in range(begin // BLOCK_K, (end + BLOCK_K - 1) // BLOCK_K):
            slot = use % NUM_BUFFERS
            mbarrier.wait(buffers.ready.index(slot), use // NUM_BUFFERS & 1)
            a = buffers.a.index(slot * GROUPS + GROUP)
            acc = warpgroup_mma(a, buffers.b.index(slot).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
            # The product before this one is done with its buffers; the very first one of a ticket has none before it.
            before = buffers.empty.index((use + NUM_BUFFERS - 1) % NUM_BUFFERS)
            mbarrier.arrive(before, count=1, pred=k > begin // BLOCK_K)
            use += 1
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(buffers.empty.index((use + NUM_BUFFERS - 1) % NUM_BUFFERS), count=1, pred=begin < end)
        if segment.handover is not None:
            if (begin < end) & (end < numbers.k):
                hand_over(acc, segment.handover, place, epoch, GROUP, GROUPS)
        if end == numbers.k:
            if segment.bias is not None or control.stamps is not None:
                tile = tile_of(ticket, epoch, segment, numbers, HOOKS.source)
                stamp(control.stamps, tile, COMPUTED, EVENTS)
            if segment.bias is not None:
                columns = tile % numbers.tiles_n * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))
                bias = gl.load(segment.bias + columns, mask=columns < numbers.n, other=0.0)
                acc += gl.expand_dims(bias.to(gl.float32), 0)
            c = activate(acc, ACTIVATION).to(c_dtype)
            for part in gl.static_range(BLOCK_N // STORE_N):
                c_slot = GROUP * STORE_BUFFERS + c_use % STORE_BUFFERS
                mbarrier.wait(buffers.c_empty.index(c_slot), (c_use // STORE_BUFFERS & 1) ^ 1)
                if BLOCK_N == STORE_N:
                    buffers.c.index(c_slot).store(c)
                else:
                    left, right = c.reshape(ROWS, 2, STORE_N).permute(0, 2, 1).split()
                    buffers.c.index(c_slot).store(left if part == 0 else right)
                fence_async_shared()
                mbarrier.arrive(buffers.c_ready.index(c_slot), count=1)
                c_use += 1
    return tickets_after(first, numbers.tickets), use, c_use


@gluon.jit
def load_role(
    a_descs, b_descs, buffers, segments, words, timeout_us,
    HOOKS: gl.constexpr, STRIDE: gl.constexpr, SEGMENTS: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    first = gl.program_id(0)
    use = 0
    for s in gl.static_range(SEGMENTS):
        first, use = load_segment(
            a_descs[s], b_descs[s], buffers, segments[s], first, use, words, timeout_us, HOOKS[s], STRIDE, GROUPS
        )  # fmt: skip


@gluon.jit
def mma_role(
    c_dtype: gl.constexpr, buffers, segments, words, timeout_us,
    HOOKS: gl.constexpr, ACTIVATIONS: gl.constexpr, SEGMENTS: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    first = gl.program_id(0)
    use = 0
    c_use = 0
    for s in gl.static_range(SEGMENTS):
        first, use, c_use = mma_segment(
            c_dtype, buffers, segments[s], first, use, c_use, words, timeout_us,
            HOOKS[s], ACTIVATIONS[s], GROUP, GROUPS,
        )  # fmt: skip


@gluon.jit
def walk_segments(
    a_descs, b_descs, c_descs, segments, words, timeout_us,
    HOOKS: gl.constexpr, ACTIVATIONS: gl.constexpr, STRIDE: gl.constexpr,
    NUM_BUFFERS: gl.constexpr, STORE_BUFFERS: gl.constexpr, GROUPS: gl.constexpr, SEGMENTS: gl.constexpr,
):  # fmt: skip
    """The kernel's body; its entry points (kernels.entry) only differ in how many descriptors they take."""
    a_desc, b_desc, c_desc = a_descs[0], b_descs[0], c_descs[0][0]
    BLOCK_N: gl.constexpr = b_desc.block_type.shape[0]
    dtype: gl.constexpr = a_desc.dtype
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    buffers = Buffers(
        a=gl.allocate_shared_memory(dtype, [NUM_BUFFERS * GROUPS] + a_desc.block_type.shape, a_desc.layout),
        b=gl.allocate_shared_memory(dtype, [NUM_BUFFERS] + b_desc.block_type.shape, b_desc.layout),
        empty=gl.allocate_shared_memory(gl.int64, [NUM_BUFFERS, 1], BARRIER),
        ready=gl.allocate_shared_memory(gl.int64, [NUM_BUFFERS, 1], BARRIER),
        c=gl.allocate_shared_memory(dtype, [STORE_BUFFERS * GROUPS] + c_desc.block_type.shape, c_desc.layout),
        c_empty=gl.allocate_shared_memory(gl.int64, [STORE_BUFFERS * GROUPS, 1], BARRIER),
        c_ready=gl.allocate_shared_memory(gl.int64, [STORE_BUFFERS * GROUPS, 1], BARRIER),
    )
    for i in gl.static_range(NUM_BUFFERS):
        mbarrier.init(buffers.empty.index(i), count=GROUPS)
        mbarrier.init(buffers.ready.index(i), count=1)
    for i in gl.static_range(STORE_BUFFERS * GROUPS):
        mbarrier.init(buffers.c_empty.index(i), count=1)
        mbarrier.init(buffers.c_ready.index(i), count=1)
    fence_async_shared()  # TMA signals these barriers, too
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (mma_role, (dtype, buffers, segments, words, timeout_us, HOOKS, ACTIVATIONS, SEGMENTS, 0, GROUPS)),
                (load_role, (a_descs, b_descs, buffers, segments, words, timeout_us, HOOKS, STRIDE, SEGMENTS, GROUPS)),
                (store_role, (c_descs, buffers, segments, words, timeout_us, BLOCK_N, HOOKS, STRIDE, SEGMENTS, GROUPS)),
            ],
            worker_num_warps=[1, 1],
            worker_num_regs=[40, 40],
        )
    else:
        gl.warp_specialize(
            [
                (mma_role, (dtype, buffers, segments, words, timeout_us, HOOKS, ACTIVATIONS, SEGMENTS, 0, GROUPS)),
                (mma_role, (dtype, buffers, segments, words, timeout_us, HOOKS, ACTIVATIONS, SEGMENTS, 1, GROUPS)),
                (load_role, (a_descs, b_descs, buffers, segments, words, timeout_us, HOOKS, STRIDE, SEGMENTS, GROUPS)),
                (store_role, (c_descs, buffers, segments, words, timeout_us, BLOCK_N, HOOKS, STRIDE, SEGMENTS, GROUPS)),
            ],
            worker_num_warps=[4, 1, 1],
            worker_num_regs=[232, 40, 40],
        )
