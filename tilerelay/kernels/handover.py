"""A tile's sum in two pieces: the CTA that begins it hands its accumulators over to the one that ends it.

The sum is continued where it stopped, so it has the same bits as in one piece, whoever computes it. The first piece of
a tile is the first thing that its CTA does: nobody waits for a CTA that waits for a sum.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilerelay.kernels.protocol import FIRST_PIECE, MATH_ROLE, wait
from tilerelay.kernels.sync import barrier, load_uniform


@triton.jit
def piece_of(ticket, segment, numbers):
    """(begin, end, place) of a ticket's share of the sum over k; all of it where tiles are not shared."""
    if segment.handover is None:
        return 0, numbers.k, 0
    else:
        piece = segment.handover.pieces + 3 * ticket
        return tl.load(piece), tl.load(piece + 1), tl.load(piece + 2)


@gluon.jit
def tickets_after(first, tickets):
    """First ticket of this CTA in the next segment: the round robin goes on where this one stopped."""
    ctas = gl.num_programs(0)
    return first + gl.maximum(tickets - first + ctas - 1, 0) // ctas * ctas - tickets


@gluon.jit
def _sums(handover, place, GROUP: gl.constexpr, GROUPS: gl.constexpr, like):
    """Where a warpgroup's accumulators wait."""
    ROWS: gl.constexpr = like.shape[0]
    COLUMNS: gl.constexpr = like.shape[1]
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, like.type.layout)) + (place * GROUPS + GROUP) * ROWS
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, like.type.layout))
    return handover.sums + gl.expand_dims(rows, 1) * COLUMNS + gl.expand_dims(columns, 0)


@gluon.jit
def hand_over(acc, handover, place, epoch, GROUP: gl.constexpr, GROUPS: gl.constexpr):
    """Give a warpgroup's accumulators to whoever waits for them on this device."""
    gl.store(_sums(handover, place, GROUP, GROUPS, acc), acc)
    barrier()  # every thread's stores, then one thread's release
    tl.atomic_xchg(handover.given + place * GROUPS + GROUP, epoch, sem="release", scope="gpu")


@gluon.jit
def wait_for_sum(
    segment, place, epoch, words, timeout_us, stage, ticket, tile, GROUP: gl.constexpr, GROUPS: gl.constexpr
):  # fmt: skip
    """Wait until another CTA has handed a warpgroup's accumulators over, or the run is being ended."""
    control = segment.control
    alive = load_uniform(control.abort) == 0
    given = segment.handover.given + place * GROUPS + GROUP
    wait(
        given, epoch, alive, control, words, timeout_us, stage, ticket, tile, FIRST_PIECE, epoch,
        MATH_ROLE + GROUP, False,
    )  # fmt: skip
    barrier()


@gluon.jit
def take_over(acc, handover, place, begun, GROUP: gl.constexpr, GROUPS: gl.constexpr):
    """The accumulators that another CTA has begun; zeros where none has.

    A load under a mask, not a branch: where accumulators come from two paths, ptxas makes every WGMMA wait for the one
    before it.
    """
    return gl.load(_sums(handover, place, GROUP, GROUPS, acc), mask=begun, other=0.0)
