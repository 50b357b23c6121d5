"""Device side of the protocol: what a kernel is handed, the prologue, the epilogue, and how a run is aborted.

The hooks know tiles, groups and counters; they know nothing of what a tile computes (paper, section III.A).
"""

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl

from tilerelay.kernels.sync import (
    POLLS_PER_CHECK,
    barrier,
    bulk_stores_complete,
    clock_ns,
    fence_proxy,
    fence_system,
    load_acquire,
    load_uniform,
    stamp,
)

# Where the next tile comes from.
ORDER = tl.constexpr(0)  # the stage's own order, nothing to wait for
QUEUE = tl.constexpr(1)  # groups (or tiles) in the order in which they became ready
COUNTER = tl.constexpr(2)  # the stage's own order, waiting for each tile's group

# How a finished tile is announced.
SILENT = tl.constexpr(0)
PUSH = tl.constexpr(1)  # count on this device; who completes a group pushes it into the consumer's queue
COUNT = tl.constexpr(2)  # count on the consumer's device

# Who in a CTA waits: the role that loads, the one that stores, or one of the math roles, from MATH_ROLE on.
LOAD_ROLE = tl.constexpr(0)
STORE_ROLE = tl.constexpr(1)
MATH_ROLE = tl.constexpr(2)
WAITING_ROLES = tl.constexpr(4)

# In an error record, in place of a counter: what a wait was for.
FIRST_PIECE = tl.constexpr(-2)  # of a sum that two CTAs share, that it was handed over
EARLIER_TILE = tl.constexpr(-3)  # in turn, that it was sent to other devices

# What an abort word holds when another CTA has ended the run; a positive one is a role's claim.
ENDED = tl.constexpr(-1)
WAKE_ALL = tl.constexpr(1 << 30)

# Timestamps of a tile, in nanoseconds of the device's clock.
SEEN = tl.constexpr(0)  # the polling thread has seen that the tile may be computed
OBTAINED = tl.constexpr(1)  # the prologue has returned: all threads of the role know the tile
LOADED = tl.constexpr(2)  # the first blocks of A and B are there for the products (persistent kernel)
COMPUTED = tl.constexpr(3)  # the last product is done
STORED = tl.constexpr(4)  # the tile's stores are complete; a relay's to peers are issued
PUBLISHED = tl.constexpr(5)  # the epilogue has returned
EVENTS = tl.constexpr(6)


class Control(NamedTuple):
    """A stage's own words, on its device, and the means to end a run."""

    numbers: object  # int32 [STAGE_NUMBERS]: see Numbers
    epoch: object  # int32 [1]: number of the current run
    finished: object  # int32 [1]: CTAs of the current run that are done
    order: object  # int32 [tickets]: the stage's own tile order
    sent: object  # int32 [tiles]: the last epoch in which each tile was on its way, where they are sent in turn
    published: object  # int32 [tiles]: the last epoch in which each tile was announced (names the missing ones)
    abort: object  # int32 [1]: not 0: the run is being ended
    abort_words: object  # int64 [words]: addresses of all stages' abort and wake words
    record: object  # int32 [record]: host-visible error record of this stage
    stamps: object  # int64 [tiles, EVENTS]: timestamps, or None


class Inbox(NamedTuple):
    """What the prologue reads. All of it lives on the consumer's device: polling is local."""

    ring: object  # int64 [power of two]: epoch << 32 | group or tile
    scoreboard: object  # int32 [counters * stride], with counter signalling
    group_of: object  # int32 [tiles]
    need: object  # int32 [counters]
    steps: object  # int32 [steps]: where each step of a tile's sum ends, in elements of k


class Outbox(NamedTuple):
    """What the epilogue reads and adds to, for one reader of the stage's output."""

    offsets: object  # int32 [tiles + 1]: CSR of the dependency array, on this device
    counters: object  # int32 [edges]
    need: object  # int32 [counters]
    member_offsets: object  # int32 [groups + 1]
    members: object  # int32 [consumer tiles]
    scoreboard: object  # int32 [counters * stride]: on this device (PUSH) or on the consumer's (COUNT)
    tail: object  # int32 [1]: queue entries ever pushed, on this device
    ring: object  # int64 [power of two]: on the consumer's device
    wake: object  # int32 [1]: on the consumer's device; the epoch of the last first push


class Handover(NamedTuple):
    """How two CTAs of a device share the sum of a tile: one begins it, the other takes its accumulators over."""

    pieces: object  # int32 [tickets, 3]: begin and end of the ticket's share of the sum, and its place in `sums`
    given: object  # int32 [places * warpgroups]: the last epoch in which each sum was handed over
    sums: object  # float32 [places, block_m, block_n]


class Segment(NamedTuple):
    """A stage, or a part of one, as a kernel is handed it."""

    control: Control
    inbox: Inbox
    outboxes: tuple[Outbox, ...]
    bias: object  # [n], or None
    handover: object  # Handover, or None: every tile is computed by one CTA
    relay: object  # Relay, or None: all copies of a tile are stored in bulk


@dataclass(frozen=True)
class Hooks:
    """Which prologue and epilogue a segment has; constants of the kernel."""

    source: int  # ORDER, QUEUE or COUNTER
    signal: int  # SILENT, PUSH or COUNT
    group_entries: bool  # its queue entries name groups; else tiles
    readers: int  # outboxes
    copies: int  # where its output is stored; the last one is on its own device if it is kept there
    way: int  # BULK, RELAY, RELAY_BUT_LAST or IN_TURN: how a tile gets to the others (kernels.relay)
    in_steps: bool = False  # its sums begin before all of their inputs are there
    kept: bool = False  # in turn: the first outbox, and the last copy, are on its own device


class Numbers(NamedTuple):
    """A stage's integers, loaded: its place in the workload, its grid, and how its rings are indexed."""

    stage: object
    tickets: object
    tiles_n: object
    n: object
    k: object
    in_entries: object
    in_mask: object
    in_group: object
    in_steps: object
    out_mask: object
    out_group: object
    under_way: object


@triton.jit
def load_numbers(control):
    """The stage's integers. In memory, not in the signature: a kernel is compiled once for all shapes."""
    at = control.numbers
    return Numbers(
        tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4),
        tl.load(at + 5), tl.load(at + 6), tl.load(at + 7), tl.load(at + 8), tl.load(at + 9),
        tl.load(at + 10), tl.load(at + 11),
    )  # fmt: skip


@triton.jit
def _end_run(control, words, stage, ticket, tile, counter, have, want, epoch):
    """Write who waits for what to the host-visible record and raise the abort word on every device (rule 7)."""
    tl.store(control.record + 1, stage)
    tl.store(control.record + 2, ticket)
    tl.store(control.record + 3, tile)
    tl.store(control.record + 4, counter)
    tl.store(control.record + 5, have)
    tl.store(control.record + 6, want)
    tl.store(control.record + 7, epoch)
    fence_system()
    tl.store(control.record, 1)
    for word in range(words):
        address = tl.load(control.abort_words + word).to(tl.pointer_type(tl.int32))
        # The table holds every stage's abort word and wake word in turn. Runs that are queued already wait for later
        # epochs: the wake word goes far past them.
        tl.atomic_xchg(address, tl.where(word % 2 == 0, ENDED, epoch + WAKE_ALL), sem="release", scope="sys")


@triton.jit
def _behind(pointer, want, EXACT: tl.constexpr):
    """(value, not there yet): counters count up and are compared wrap-safe, a queue entry must carry the epoch."""
    if EXACT:
        value = (load_acquire(pointer) >> 32).to(tl.int32)
        return value, value != want
    else:
        value = load_acquire(pointer)
        return value, (value - want) < 0


@triton.jit
def wait(
    pointer, want, alive, control, words, timeout_us, stage, ticket, tile, counter, epoch,
    ROLE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Poll this device's own memory until the word is there; False when the run was aborted instead.

    Every wait is bounded: after `timeout_us` microseconds it raises the abort (rule 7). After an abort nothing polls.
    """
    if alive:
        value, behind = _behind(pointer, want, EXACT)
        if behind:
            deadline = clock_ns() + timeout_us.to(tl.int64) * 1000
            mine = WAITING_ROLES * tl.program_id(0) + ROLE + 1
            polls = 0
            while behind & alive:
                value, behind = _behind(pointer, want, EXACT)
                polls += 1
                if behind & (polls % POLLS_PER_CHECK == 0):
                    # One thread looks at its clock and claims the abort word; all threads see what stands there then,
                    # so that they leave the loop together. Who finds its own claim ends the run.
                    claim = tl.where(clock_ns() > deadline, mine, 0)
                    tl.atomic_cas(control.abort, 0, claim, sem="relaxed", scope="sys")
                    raised = load_uniform(control.abort)
                    if raised == mine:
                        _end_run(control, words, stage, ticket, tile, counter, value, want, epoch)
                    alive = raised == 0
    return alive


@triton.jit
def queue_slot(ticket, epoch, numbers):
    """Ring slot of a ticket: `in_entries` are pushed in every epoch, an entry serves `in_group` tickets."""
    return ((epoch - 1) * numbers.in_entries + ticket // numbers.in_group) & numbers.in_mask


@triton.jit
def tile_of(ticket, epoch, segment, numbers, SOURCE: tl.constexpr):
    """The tile of a ticket whose prologue has run, in this role or in one that this role has waited for."""
    if SOURCE == QUEUE:
        entry = tl.load(segment.inbox.ring + queue_slot(ticket, epoch, numbers), volatile=True)
        return entry.to(tl.int32) * numbers.in_group + ticket % numbers.in_group
    else:
        return tl.load(segment.control.order + ticket)


@triton.jit
def _await_counter(
    counter, ticket, tile, alive, epoch, segment, numbers, words, timeout_us, STRIDE: tl.constexpr
):  # fmt: skip
    """Wait until all tiles that a counter counts are published; False when the run was aborted instead."""
    want = epoch * tl.load(segment.inbox.need + counter)
    return wait(
        segment.inbox.scoreboard + counter * STRIDE, want, alive, segment.control, words, timeout_us,
        numbers.stage, ticket, tile, counter, epoch, LOAD_ROLE, False,
    )  # fmt: skip


@triton.jit
def prologue(ticket, alive, epoch, segment, numbers, words, timeout_us, SOURCE: tl.constexpr, STRIDE: tl.constexpr):
    """Wait until the ticket's tile may be computed; (tile, alive).

    Precondition: called by all threads of the role that will issue the tile's loads. On return these threads may load
    the prerequisites, or those of the first step, by ordinary loads and by TMA (rule 4). `alive` is False when the run
    was aborted: then the tile is some tile of the grid, and its result is worth nothing.
    """
    control, inbox, stage = segment.control, segment.inbox, numbers.stage
    if SOURCE == QUEUE:
        slot = inbox.ring + queue_slot(ticket, epoch, numbers)
        alive = wait(slot, epoch, alive, control, words, timeout_us, stage, ticket, -1, -1, epoch, LOAD_ROLE, True)
    tile = tile_of(ticket, epoch, segment, numbers, SOURCE)
    if SOURCE == COUNTER:
        counter = tl.load(inbox.group_of + tile) * numbers.in_steps
        alive = _await_counter(counter, ticket, tile, alive, epoch, segment, numbers, words, timeout_us, STRIDE)
    stamp(control.stamps, tile, SEEN, EVENTS)
    if SOURCE != ORDER:
        barrier()
        fence_proxy()
    stamp(control.stamps, tile, OBTAINED, EVENTS)
    return tile, alive


@triton.jit
def look_up_steps(tile, lanes, segment, numbers):
    """Of a tile's steps, a lane each: (first counter, how many tiles each counts, where each step ends)."""
    inbox = segment.inbox
    there = lanes < numbers.in_steps
    first = tl.load(inbox.group_of + tile) * numbers.in_steps
    need = tl.load(inbox.need + first + lanes, mask=there, other=0)
    return first, need, tl.load(inbox.steps + lanes, mask=there, other=0)


@triton.jit
def await_step(
    ticket, tile, steps, ready, alive, epoch, lanes, segment, numbers, words, timeout_us, STRIDE: tl.constexpr
):  # fmt: skip
    """Wait until more steps of a tile's sum than `ready` have their inputs; (how many have, where they end, alive).

    Precondition: as for the prologue, which has waited for the first step. `steps`: from `look_up_steps`; one look of
    all lanes then finds all steps that are ready.
    """
    first, need, ends = steps
    there = lanes < numbers.in_steps
    count = load_acquire(segment.inbox.scoreboard + (first + lanes) * STRIDE, lanes * 0, there)
    found = tl.min(tl.where(there & (count - epoch * need < 0), lanes, numbers.in_steps))
    if found <= ready:
        alive = _await_counter(first + ready, ticket, tile, alive, epoch, segment, numbers, words, timeout_us, STRIDE)
        found = ready + 1
    barrier()
    fence_proxy()
    return found, tl.max(tl.where(lanes < found, ends, 0)), alive


@triton.jit
def tile_before(ticket, control, numbers):
    """The tile that must be on its way before this ticket's may be sent; none: -1."""
    before = ticket - numbers.under_way
    return tl.load(control.order + before, mask=before >= 0, other=-1)


@triton.jit
def await_turn(ticket, tile, before, epoch, segment, numbers, words, timeout_us):
    """Wait until the tile may be sent to other devices: at most `under_way` of the stage are at a time.

    It paces, and orders nothing: what it waits for is written by a relaxed atomic (docs/protocol.md, section 6).
    """
    if before >= 0:
        control = segment.control
        alive = load_uniform(control.abort) == 0
        wait(
            control.sent + before, epoch, alive, control, words, timeout_us, numbers.stage, ticket, tile, EARLIER_TILE,
            epoch, STORE_ROLE, False,
        )  # fmt: skip


@triton.jit
def epilogue(
    tile, epoch, alive, lanes, segment, numbers,
    FIRST: tl.constexpr, END: tl.constexpr, HOOKS: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """Wait until a tile is stored, then announce it to the groups that need it, unless the run is being ended.

    Precondition: all threads of the role call this, the ones that issued the tile's stores among them. `lanes` is a
    vector 0..31, one element per thread of a warp: it adds to 32 counters at once (paper, III.A.4: "SIMD execution").
    The readers FIRST to END - 1 are told, and with the last of all, the host.
    """
    control = segment.control
    # Looked up while the stores are under way: two loads after each other are more than a microsecond.
    tables = ()
    for reader in tl.static_range(FIRST, END):
        outbox = segment.outboxes[reader]
        start, end = tl.load(outbox.offsets + tile), tl.load(outbox.offsets + tile + 1)
        counter = tl.load(outbox.counters + start + lanes, mask=start + lanes < end, other=0)
        tables = tables + ((start, end, counter),)  # type: ignore[assignment]
    if HOOKS.signal != SILENT or control.stamps is not None:
        bulk_stores_complete()  # rule 1
        stamp(control.stamps, tile, STORED, EVENTS)
    if HOOKS.signal != SILENT:
        barrier()  # rule 2: every thread's stores
        if alive:
            fence_system()  # rule 3: one fence in every publishing lane, then plain adds
            for reader in tl.static_range(FIRST, END):
                outbox = segment.outboxes[reader]
                start, end, counter = tables[reader - FIRST]  # type: ignore[misc]
                while start < end:
                    _count(counter, start + lanes < end, epoch, outbox, numbers, HOOKS, STRIDE)
                    start += 32
                    counter = tl.load(outbox.counters + start + lanes, mask=start + lanes < end, other=0)
            if END == HOOKS.readers:
                tl.store(control.published + tile, epoch)
    stamp(control.stamps, tile, PUBLISHED, EVENTS)


@triton.jit
def _count(counter, mask, epoch, outbox, numbers, HOOKS: tl.constexpr, STRIDE: tl.constexpr):
    """Add one to each lane's counter; with queue signalling, push the groups that this completes."""
    address = outbox.scoreboard + counter * STRIDE
    one = counter * 0 + 1
    if HOOKS.signal == COUNT:
        tl.atomic_add(address, one, mask=mask, sem="relaxed", scope="sys")
    else:
        need = tl.load(outbox.need + counter, mask=mask, other=0)
        # acq_rel: whoever completes the group has observed the other producers' tiles, and releases them too.
        count = tl.atomic_add(address, one, mask=mask, sem="acq_rel", scope="gpu") + 1
        complete = mask & (count == epoch * need)
        _push(counter, complete, epoch, outbox, numbers, HOOKS.group_entries)


@triton.jit
def _push(group, complete, epoch, outbox, numbers, GROUP_ENTRIES: tl.constexpr):
    """Push complete groups into the consumer's ring: a fire-and-forget remote write with release order (rule 3)."""
    stamp = epoch.to(tl.int64) << 32
    if GROUP_ENTRIES:
        slot = tl.atomic_add(outbox.tail + group * 0, group * 0 + 1, mask=complete, sem="relaxed", scope="gpu")
        tl.atomic_xchg(
            outbox.ring + (slot & numbers.out_mask), stamp | group, mask=complete, sem="release", scope="sys"
        )
    else:
        start = tl.load(outbox.member_offsets + group, mask=complete, other=0)
        size = tl.load(outbox.member_offsets + group + 1, mask=complete, other=0) - start
        slot = tl.atomic_add(outbox.tail + group * 0, size, mask=complete, sem="relaxed", scope="gpu")
        for member in range(numbers.out_group):
            mask = complete & (member < size)
            tile = tl.load(outbox.members + start + member, mask=mask, other=0)
            tl.atomic_xchg(
                outbox.ring + ((slot + member) & numbers.out_mask), stamp | tile, mask=mask, sem="release", scope="sys"
            )
    # The stream of a consumer that sleeps (cuStreamWaitValue32) is woken by the first push of an epoch.
    tl.atomic_xchg(outbox.wake + group * 0, epoch + group * 0, mask=complete, sem="release", scope="sys")


@triton.jit
def leave(control, epoch):
    """A CTA needs the epoch no longer. The last one of the grid moves it on, for the next launch to find.

    Precondition: every role of this CTA that reads the epoch has read it, or has no tile.
    """
    if tl.atomic_add(control.finished, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        tl.store(control.finished, 0)
        tl.store(control.epoch, epoch + 1)
