"""The ordering rules of docs/protocol.md, checked on every path of a kernel's PTX."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from operator import is_

from tests.kernels.ptx import Instruction, Program, Test
from tilerelay.kernels.entry import UNSPECIALISED
from tilerelay.kernels.protocol import COUNT, ORDER, PUSH, SILENT, Control, Handover, Hooks, Inbox, Outbox
from tilerelay.kernels.relay import IN_TURN, RELAY, RELAYS, Relay

_ACCESSES = ("ld.", "st.", "atom.", "red.")
_DESCRIPTOR = ("", ".rows", ".cols", ".row_stride", ".col_stride")


def stored_in_bulk(hooks: Hooks) -> int:
    """Copies of a segment's output that bulk stores write: these have descriptors."""
    return 1 if hooks.way == RELAY.value else hooks.copies


def parameter_names(
    segments: Sequence[Hooks], *, stamps: bool = False, bias: bool = False, shared: Sequence[int] = ()
) -> list[str]:
    """Names of a kernel's PTX parameters, in order: descriptors, what the segments hold, integers, Triton's own.

    A segment's begin with its number: `0.a`, `0.c1` (a copy), `0.control.epoch`, `0.outbox1.scoreboard` (a reader).
    """

    def descriptors(s: int, hooks: Hooks) -> Iterator[str]:
        for tensor in ("a", "b", *(f"c{copy}" for copy in range(stored_in_bulk(hooks)))):
            yield from (f"{s}.{tensor}{part}" for part in _DESCRIPTOR)

    def words(s: int, hooks: Hooks) -> Iterator[str]:
        yield from (f"{s}.control.{name}" for name in Control._fields if stamps or name != "stamps")
        yield from (f"{s}.inbox.{name}" for name in Inbox._fields)
        for reader in range(hooks.readers):
            yield from (f"{s}.outbox{reader}.{name}" for name in Outbox._fields)
        yield from [f"{s}.bias"] if bias else []
        yield from (f"{s}.handover.{name}" for name in Handover._fields if s in shared)
        yield from (f"{s}.relay.{name}" for name in Relay._fields if hooks.way in RELAYS)

    numbered = list(enumerate(segments))
    names = [name for make in (descriptors, words) for s, hooks in numbered for name in make(s, hooks)]
    return [*names, *UNSPECIALISED, "scratch", "profile"]


def broken_rules(
    ptx: str,
    *,
    kind: str,
    segments: Sequence[Hooks],
    stamps: bool = False,
    bias: bool = False,
    shared: Sequence[int] = (),
) -> list[str]:
    """What is wrong with a kernel's code, a line each that begins with the number of the rule; empty when all hold."""
    names = parameter_names(segments, stamps=stamps, bias=bias, shared=shared)
    program = Program(ptx, names)
    if found := wrong_parameters(program, names):
        return found  # no address can be told without the right names
    found = [line for s, hooks in enumerate(segments) for line in _Rules(program, kind, s, hooks, s in shared).broken()]
    waits = shared or any(hooks.source != ORDER.value or hooks.way == IN_TURN.value for hooks in segments)
    if not stamps and not waits:
        found += [f"rule 7: `{i}` where nothing waits" for i in program.where(lambda i: "%globaltimer" in i.operands)]
    return found


def wrong_parameters(program: Program, names: list[str]) -> list[str]:
    """Rule 6: integers are plain i32, none was folded into the code."""
    types = [t for t, _ in program.parameters]
    if len(types) != len(names):
        return [f"rule 6: {len(types)} parameters for {len(names)} arguments: one was made a constant"]
    wanted = dict.fromkeys(UNSPECIALISED, ".u32")
    wrong = [name for name, t in zip(names, types, strict=True) if wanted.get(name, t) != t]
    return [f"rule 6: {name} is no plain integer" for name in wrong]


class _Rules:
    """The rules for one segment of a kernel.

    All warps of a classical CTA take part in a role, so that only a barrier of the CTA joins them.
    """

    def __init__(self, program: Program, kind: str, segment: int, hooks: Hooks, shares_sums: bool) -> None:
        self.program, self.segment, self.hooks, self.shares_sums = program, segment, hooks, shares_sums
        self.source, self.signal = hooks.source, hooks.signal
        self._barriers = ("bar.sync", "barrier.sync") + (() if kind == "classical" else ("bar.warp.sync",))

    def broken(self) -> list[str]:
        return [
            f"{line} (segment {self.segment})"
            for rule in (
                self.stores_complete, self.relaying, self.publishing, self.waiting, self.memory_words,
                self.bounded_waits, self.turns, self.normal_exit, self.sums,
            )
            for line in rule()
        ]  # fmt: skip

    # What an instruction is. A predicate only hides those that order others: see Program.unordered.

    def bulk_store(self, i: Instruction) -> bool:
        """A store of this segment's tiles."""
        return self.any_bulk_store(i) and self.program.memory(i).startswith(f"{self.segment}.c")

    def any_bulk_store(self, i: Instruction) -> bool:
        return i.opcode.startswith("cp.async.bulk.tensor") and ".global.shared::cta" in i.opcode

    def bulk_load(self, i: Instruction) -> bool:
        return i.opcode.startswith("cp.async.bulk.tensor") and ".shared::cluster.global" in i.opcode

    def full_wait(self, i: Instruction) -> bool:
        return i.opcode == "cp.async.bulk.wait_group" and i.operands == "0"

    def barrier(self, i: Instruction) -> bool:
        return i.opcode.startswith(self._barriers)

    def system_fence(self, i: Instruction) -> bool:
        return i.opcode in ("fence.acq_rel.sys", "fence.sc.sys")

    def proxy_fence(self, i: Instruction) -> bool:
        return i.opcode == "fence.proxy.async"

    def access(self, *memory: str, opcode: str = "", loaded: bool = False) -> Test:
        """Any access of the memory that these parameters of the segment point at, or whose address is loaded there."""
        opcodes = tuple(opcode.split()) if opcode else _ACCESSES
        elsewhere = {"param", "shared"}
        names = {f"{'*' if loaded else ''}{self.segment}.{name}" for name in memory}
        return lambda i: (
            i.opcode.startswith(opcodes)
            and not elsewhere & set(i.opcode.split("."))
            and self.program.memory(i) in names
        )

    def used(self, what: str) -> list[Instruction]:
        """Accesses of anything in the segment's inbox or outboxes."""
        prefix = f"{self.segment}.{what}"
        return self.program.where(
            lambda i: i.opcode.startswith(_ACCESSES) and self.program.memory(i).startswith(prefix)
        )

    def to_readers(self, *names: str) -> list[str]:
        return [f"outbox{reader}.{name}" for reader in range(self.hooks.readers) for name in names]

    @property
    def publish(self) -> Test:
        return self.access(*self.to_readers("scoreboard", "ring", "wake"), opcode="st. atom. red.")

    @property
    def poll(self) -> Test:
        """A read of what producers write, but for re-reads of an entry that a prologue has waited for."""
        read = self.access("inbox.ring", "inbox.scoreboard")
        return lambda i: read(i) and not i.opcode.startswith("ld.volatile")

    def _paths(self, rule: str, what: str, start: Test, sequence: Sequence[Test], end: Test) -> list[str]:
        return [
            f"{rule}: {what}: `{first}` reaches `{last}` after {done} of {len(sequence)} steps"
            for first, last, done in self.program.unordered(start, sequence, end)
        ]

    def stores_complete(self) -> list[str]:
        """Rule 1: every copy in bulk is stored, and a full wait is between these bulk stores and the next publish."""
        stores = Counter(self.program.memory(i) for i in self.program.where(self.bulk_store))
        copies = [stores[f"{self.segment}.c{copy}"] for copy in range(stored_in_bulk(self.hooks))]
        found = [] if min(copies) == max(copies) > 0 else [f"rule 1: its copies are stored {copies} times"]
        if self.signal != SILENT.value:
            what = "published before its store is complete"
            found += self._paths("rule 1", what, self.bulk_store, [self.full_wait], self.publish)
        return found

    def relaying(self) -> list[str]:
        """Rules 1 to 3 in a relay: full wait, barrier, loads past L1, a store to each peer; then barrier and fence."""
        program, publish, peers = self.program, self.publish, self.hooks.copies - 1
        past_l1: Test = lambda i: "cg" in i.opcode.split(".")
        if self.hooks.way not in RELAYS:
            own: Test = lambda i: past_l1(i) and program.memory(i).startswith(f"{self.segment}.")
            peer: Test = lambda i: i.opcode.startswith("st.") and program.memory(i).startswith(f"*{self.segment}.")
            return [f"rule 1: `{i}` where nothing is relayed" for what in (own, peer) for i in program.where(what)]
        load, store = self.access("relay.own", opcode="ld."), self.access("relay.peers", opcode="st.", loaded=True)
        loads, stores = program.where(load), program.where(store)
        found = [f"rule 1: `{i}` may find what L1 held before" for i in loads if not past_l1(i)]
        if not loads or len(stores) != len(loads) * peers:
            found.append(f"rule 1: {len(loads)} loads are stored {len(stores)} times to {peers} peers")
        for part in program.where(self.access(f"c{stored_in_bulk(self.hooks) - 1}", opcode="cp.async.bulk.tensor")):
            early = program.reached(program.roles, stop=partial(is_, part))
            found += [f"rule 1: `{i}` comes before `{part}`" for i in loads if i.index in early]
        ordering = [self.full_wait, self.barrier, self.system_fence]
        found += self._paths("rule 1", "relayed before its store is complete", self.bulk_store, ordering[:1], load)
        found += self._paths("rule 2", "no barrier before the relay's loads", self.bulk_store, ordering[:2], load)
        found += self._paths("rule 2", "no barrier after the relay's stores", store, ordering[1:2], publish)
        found += self._paths("rule 3", "no fence after the relay's stores", store, ordering[1:], publish)
        return found

    def publishing(self) -> list[str]:
        """Rules 2 and 3: wait, barrier, one fence for the tile, then atomics of the right order and scope."""
        program, publish = self.program, self.publish
        published = program.where(publish)
        if self.signal == SILENT.value:
            return [f"rule 3: a silent kernel has `{i}`" for i in self.used("outbox")]
        found = [] if published else ["rule 3: nothing is published"]
        ordering = [self.full_wait, self.barrier, self.system_fence]
        found += self._paths("rule 2", "no barrier after the full wait", self.bulk_store, ordering[:2], publish)
        found += self._paths("rule 3", "no fence after the barrier", self.bulk_store, ordering, publish)
        # A wait that ends the run has a fence of its own, for the record that it has written.
        record: Test = lambda i: i.opcode.startswith("st.") and program.memory(i).endswith(".control.record")
        for fence in program.where(self.system_fence):
            ends: Test = lambda i: self.any_bulk_store(i) or record(i)
            reached = {program.instructions[n] for n in program.after(fence, stop=ends)}
            if any(map(publish, reached)) and any(map(self.system_fence, reached)):
                found.append(f"rule 3: more than one fence for a tile after `{fence}`")
        wanted = dict.fromkeys(self.to_readers("scoreboard"), ("relaxed", "sys", "add"))
        if self.signal == PUSH.value:
            wanted = dict.fromkeys(self.to_readers("scoreboard"), ("acq_rel", "gpu", "add"))
            wanted |= dict.fromkeys(self.to_readers("ring", "wake"), ("release", "sys", "exch"))
            count = self.access(*self.to_readers("scoreboard"), opcode="atom.")
            push = self.access(*self.to_readers("ring"))
            for fence in program.where(self.system_fence):
                early = [program.instructions[n] for n in program.after(fence, stop=count)]
                found += [f"rule 3: `{i}` can come before the count of its group" for i in early if push(i)]
        missing = set(wanted)
        for i in published:
            name = program.memory(i).split(".", 1)[1]
            once = self.signal == COUNT.value and name not in missing
            modifiers = None if once else wanted.get(name)
            missing.discard(name)
            given = set(i.opcode.split("."))
            if not modifiers or not given & {"atom", "red"} or not set(modifiers) <= given:
                found.append(f"rule 3: `{i}` should be {modifiers or 'left out'}")
        return found + [f"rule 3: nothing is published to {name}" for name in sorted(missing)]

    def waiting(self) -> list[str]:
        """Rule 4: acquire loads at system scope; barrier and full proxy fence between them and the next bulk load."""
        program, polls = self.program, self.program.where(self.poll)
        if self.source == ORDER.value:
            return [f"rule 4: a kernel that waits for nothing has `{i}`" for i in self.used("inbox")]
        found = [] if polls else ["rule 4: no acquire load polls"]
        wanted = {"acquire", "sys"}
        found += [f"rule 4: `{i}` is no acquire.sys" for i in polls if not wanted <= set(i.opcode.split("."))]
        # Beside the wait's two, for its first look and its loop, one look of all lanes for the steps of a sum.
        looks = sum(i.opcode.startswith("atom.") for i in polls)
        found += [] if looks == self.hooks.in_steps else [f"rule 4: {looks} looks at the steps of a sum"]
        ordering = [self.barrier, self.proxy_fence]
        found += self._paths("rule 4", "no barrier after the poll", self.poll, ordering[:1], self.bulk_load)
        found += self._paths("rule 4", "no proxy fence after the poll", self.poll, ordering, self.bulk_load)
        loads = {i.index for i in program.where(self.bulk_load)}
        found += [f"rule 4: no bulk load comes after `{i}` in its role" for i in polls if not loads & program.after(i)]
        return found

    def memory_words(self) -> list[str]:
        """Rule 6: epoch and numbers are loaded from memory, in each role, before anything that depends on them."""
        signals = [self.poll] if self.source != ORDER.value else []
        signals += [self.publish] if self.signal != SILENT.value else []
        signals += [self.access("handover.given")] if self.shares_sums else []
        loads = lambda i: self.bulk_load(i) and self.program.memory(i).startswith(f"{self.segment}.")
        tiles = lambda i: self.bulk_store(i) or loads(i)
        found = []
        for name, uses in (("epoch", signals), ("numbers", [*signals, tiles])):
            load = self.access(f"control.{name}", opcode="ld.")
            found += [] if self.program.where(load) else [f"rule 6: the {name} is not loaded from memory"]
            for start in self.program.roles or [0]:
                early = [self.program.instructions[n] for n in self.program.reached([start], stop=load)]
                found += [f"rule 6: `{i}` before the {name} is loaded" for use in uses for i in early if use(i)]
        return found

    def bounded_waits(self) -> list[str]:
        """Rule 7: every loop that polls reads the clock and the abort word, and can raise the abort on every device."""
        program = self.program
        clocks = {i.index for i in program.where(lambda i: "%globaltimer" in i.operands)}
        stores = {i.index for i in program.where(self.access("control.record", opcode="st."))}
        if self.source == ORDER.value and not self.shares_sums and self.hooks.way != IN_TURN.value:
            return ["rule 7: a record is written where nothing waits"] if stores else []
        needed = {
            "a look at the clock": clocks,
            "a look at the abort word": {i.index for i in program.where(self.access("control.abort", opcode="ld."))},
            "a record": stores,
            "raising the abort": {
                i.index for i in program.where(self.access("control.abort_words", opcode="atom.", loaded=True))
            },
        }
        polls = [(poll, program.after(poll, stop=self.bulk_load)) for poll in program.where(self.poll)]
        turns = program.where(self.access("control.sent", opcode="ld."))
        polls += [(i, program.after(i, stop=self.any_bulk_store)) for i in turns]
        taken = self.access("handover.sums", opcode="ld.")
        polls += [(i, program.after(i, stop=taken)) for i in program.where(self.access("handover.given", opcode="ld."))]
        return [f"rule 7: `{poll}` waits without {w}" for poll, loop in polls for w in needed if not loop & needed[w]]

    def turns(self) -> list[str]:
        """Rules 1 to 3 and 8 in turn: a tile waits for one before it, is sent, lets one behind it go, is announced.

        A reader on the tile's own device is told before all that, and nobody else is.
        """
        program, sent = self.program, self.access("control.sent", opcode="st. atom. red.")
        if self.hooks.way != IN_TURN.value:
            found = program.where(self.access("control.sent"))
            return [f"rule 8: `{i}` where tiles are not sent in turn" for i in found]
        waits, kept = program.where(self.access("control.sent", opcode="ld.")), int(self.hooks.kept)
        others = {f"{self.segment}.c{copy}" for copy in range(self.hooks.copies - kept)}
        read: Test = lambda i: i.opcode == "cp.async.bulk.wait_group.read" and i.operands == "0"
        to_others: Test = lambda i: self.bulk_store(i) and program.memory(i) in others
        elsewhere = self.access(*(f"outbox{reader}.scoreboard" for reader in range(kept, self.hooks.readers)))
        found = [] if waits else ["rule 8: no tile waits for its turn"]
        found += [] if len(program.where(sent)) == 1 else ["rule 8: no tile lets the next one go"]
        found += self._paths("rule 8", "the next tile is let go before this one is read", to_others, [read], sent)
        for store in program.where(to_others):
            ends = program.after(store, stop=lambda i: sent(i) or self.publish(i))
            if any(self.publish(program.instructions[n]) for n in ends):
                found.append(f"rule 8: after `{store}` nobody is let go")
        if kept:
            own: Test = lambda i: self.bulk_store(i) and not to_others(i)
            found += self._paths("rule 1", "announced elsewhere before it is sent", own, [read], elsewhere)
        return found

    def sums(self) -> list[str]:
        """Rules 2 to 4 within a device: a sum, a barrier, a release; an acquire, a barrier of all warps, the sum."""
        if not self.shares_sums:
            return []
        store, load = (self.access("handover.sums", opcode=opcode) for opcode in ("st.", "ld."))
        give, poll = self.access("handover.given", opcode="st. atom. red."), self.access("handover.given", opcode="ld.")
        barrier: Test = lambda i: i.opcode.startswith(("bar.sync", "barrier.sync"))
        given = {i: set(i.opcode.split(".")) for what in (give, poll) for i in self.program.where(what)}
        found = [] if all(map(self.program.where, (store, load, give, poll))) else ["rule 3: no sum is handed over"]
        found += self._paths("rule 2", "no barrier after a sum's stores", store, [barrier], give)
        found += [f"rule 3: `{i}` releases nothing" for i in given if give(i) and not {"release", "gpu"} <= given[i]]
        found += [f"rule 4: `{i}` is no acquire" for i in given if poll(i) and not {"acquire", "sys"} <= given[i]]
        return found + self._paths("rule 4", "no barrier after the poll for a sum", poll, [barrier], load)

    def normal_exit(self) -> list[str]:
        """Rule 7: no trap; no warp role ends the kernel from its middle; after an abort nothing is published."""
        program = self.program
        found = [f"rule 7: `{i}`" for i in program.where(lambda i: i.opcode in ("trap", "exit", "brkpt"))]
        returns = program.where(lambda i: i.opcode == "ret")
        if len(returns) != 1 or returns[0].guard:
            found.append(f"rule 7: {len(returns)} ways out of the kernel")
        for start in program.roles:
            reached = program.reached([start])
            if len(reached) > 1 and any(i.index in reached for i in returns):
                found.append(f"rule 7: the role at `{program.instructions[start]}` can leave the kernel alone")
        abort = self.access("control.abort", opcode="ld.")
        # The role that stores did not wait itself: it looks once for every tile.
        starts = [n for i in program.where(self.bulk_store) for n in i.next] if program.roles else [0]
        early = [program.instructions[n] for n in program.reached(starts, stop=abort)]
        return found + [f"rule 7: `{i}` without a look at the abort word" for i in early if self.publish(i)]

    def split_barriers(self) -> list[str]:
        """Barriers that some warps may not reach: those under a branch that each thread decides on its own.

        Its condition comes from memory that changes during the run, or from the clock. Lanes of one warp read at the
        same time; the warps of a CTA do not, may disagree, and then meet different barriers.
        """
        program = self.program
        changing = {"globaltimer", f"volatile *{self.segment}.control.abort"}
        found = []
        for branch in program.where(lambda i: i.opcode.startswith("bra") and bool(changing & program.origins(i.guard))):
            split = {program.instructions[n] for n in program.between_split_and_join(branch)}
            found += [f"`{i}` is met by some warps only, after `{branch}`" for i in split if self.joins_warps(i)]
        return found

    def joins_warps(self, i: Instruction) -> bool:
        """A barrier of several warps: of a classical CTA, or of a warpgroup."""
        return self.barrier(i) and (bool(self.program.roles) <= i.operands.endswith(", 128"))


def split_barriers(ptx: str, kind: str, hooks: Hooks, shared: Sequence[int] = ()) -> list[str]:
    """Barriers of several warps that these may not all reach; roles of one warp are safe."""
    program = Program(ptx, parameter_names([hooks], shared=shared))
    return _Rules(program, kind, 0, hooks, bool(shared)).split_barriers()
