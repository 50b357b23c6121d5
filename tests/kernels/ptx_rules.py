"""The ordering rules of docs/protocol.md, checked on every path of a kernel's PTX."""

from __future__ import annotations

from tests.kernels.ptx import Instruction, Program, Test
from tilerelay.kernels.gemm_classical import UNSPECIALISED
from tilerelay.kernels.protocol import COUNT, ORDER, PUSH, SILENT, Control, Inbox, Outbox

_ACCESSES = ("ld.", "st.", "atom.", "red.")
_DESCRIPTOR = ("", ".rows", ".cols", ".row_stride", ".col_stride")


def parameter_names(stamps: bool) -> list[str]:
    """Names of a kernel's PTX parameters, in order."""
    tensors = [f"{tensor}{part}" for tensor in ("a_desc", "b_desc", "c_desc") for part in _DESCRIPTOR]
    words = [f"{t.__name__.lower()}.{name}" for t in (Control, Inbox, Outbox) for name in t._fields]
    if not stamps:
        words.remove("control.stamps")
    return [*tensors, "bias", *words, *UNSPECIALISED, "scratch", "profile"]


def broken_rules(ptx: str, *, kind: str, source: int, signal: int, stamps: bool = False) -> list[str]:
    """What is wrong with a kernel's code, a line each that begins with the number of the rule; empty when all hold."""
    names = parameter_names(stamps)
    program = Program(ptx, names)
    rules = _Rules(program, cta_wide=kind == "classical")
    if found := rules.parameters(names):
        return found  # no address can be told without the right names
    return [
        *rules.stores_complete(signal),
        *rules.publishing(signal),
        *rules.waiting(source),
        *rules.epoch(source, signal),
        *rules.bounded_waits(source),
        *rules.normal_exit(),
    ]


class _Rules:
    """Args: cta_wide: all warps of the CTA take part in a role, so that only a barrier of the CTA joins them."""

    def __init__(self, program: Program, cta_wide: bool) -> None:
        self.program = program
        self._barriers = ("bar.sync", "barrier.sync") if cta_wide else ("bar.sync", "barrier.sync", "bar.warp.sync")

    # What an instruction is. A predicate only hides those that order others: see Program.unordered.

    def bulk_store(self, i: Instruction) -> bool:
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

    def access(self, *memory: str, opcode: str = "") -> Test:
        """Any access of the memory that these parameters point at."""
        opcodes = tuple(opcode.split()) if opcode else _ACCESSES
        elsewhere = {"param", "shared"}
        return lambda i: (
            i.opcode.startswith(opcodes)
            and not elsewhere & set(i.opcode.split("."))
            and self.program.memory(i) in memory
        )

    @property
    def publish(self) -> Test:
        return self.access("outbox.scoreboard", "outbox.ring", "outbox.wake", opcode="st. atom. red.")

    @property
    def poll(self) -> Test:
        """A read of what producers write, but for re-reads of an entry that a prologue has waited for."""
        read = self.access("inbox.ring", "inbox.scoreboard")
        return lambda i: read(i) and not i.opcode.startswith("ld.volatile")

    def _paths(self, rule: str, what: str, start: Test, sequence: list[Test], end: Test) -> list[str]:
        return [
            f"{rule}: {what}: `{first}` reaches `{last}` after {done} of {len(sequence)} steps"
            for first, last, done in self.program.unordered(start, sequence, end)
        ]

    def parameters(self, names: list[str]) -> list[str]:
        """Rule 6: integers are plain i32 (the deadline i64), none was folded into the code."""
        types = [t for t, _ in self.program.parameters]
        if len(types) != len(names):
            return [f"rule 6: {len(types)} parameters for {len(names)} arguments: one was made a constant"]
        wanted = dict.fromkeys(UNSPECIALISED, ".u32")
        wrong = [name for name, t in zip(names, types, strict=True) if wanted.get(name, t) != t]
        return [f"rule 6: {name} is no plain integer" for name in wrong]

    def stores_complete(self, signal: int) -> list[str]:
        """Rule 1: a full wait between a bulk store and the next publish, and before the CTA counts itself out."""
        found = [] if self.program.where(self.bulk_store) else ["rule 1: no bulk store was recognised"]
        if signal != SILENT.value:
            what = "published before its store is complete"
            found += self._paths("rule 1", what, self.bulk_store, [self.full_wait], self.publish)
        return found

    def publishing(self, signal: int) -> list[str]:
        """Rules 2 and 3: wait, barrier, one fence for the tile, then atomics of the right order and scope."""
        program, publish = self.program, self.publish
        published = program.where(publish)
        if signal == SILENT.value:
            used = program.where(lambda i: i.opcode.startswith(_ACCESSES) and program.memory(i).startswith("outbox."))
            return [f"rule 3: a silent kernel has `{i}`" for i in used]
        found = [] if published else ["rule 3: nothing is published"]
        ordering = [self.full_wait, self.barrier, self.system_fence]
        found += self._paths("rule 2", "no barrier after the full wait", self.bulk_store, ordering[:2], publish)
        found += self._paths("rule 3", "no fence after the barrier", self.bulk_store, ordering, publish)
        for fence in program.where(self.system_fence):
            reached = {program.instructions[n] for n in program.after(fence, stop=self.bulk_store)}
            if any(map(publish, reached)) and any(map(self.system_fence, reached)):
                found.append(f"rule 3: more than one fence for a tile after `{fence}`")
        wanted = {"outbox.scoreboard": ("relaxed", "sys", "add")}
        if signal == PUSH.value:
            release = ("release", "sys", "exch")
            wanted = {"outbox.scoreboard": ("acq_rel", "gpu", "add"), "outbox.ring": release, "outbox.wake": release}
            count = self.access("outbox.scoreboard", opcode="atom.")
            push = self.access("outbox.ring")
            for fence in program.where(self.system_fence):
                early = [program.instructions[n] for n in program.after(fence, stop=count)]
                found += [f"rule 3: `{i}` can come before the count of its group" for i in early if push(i)]
        for i in published:
            modifiers = wanted.pop(program.memory(i), None) if signal == COUNT.value else wanted.get(program.memory(i))
            given = set(i.opcode.split("."))
            if not modifiers or not given & {"atom", "red"} or not set(modifiers) <= given:
                found.append(f"rule 3: `{i}` should be {modifiers or 'left out'}")
        missing = set(wanted) - {program.memory(i) for i in published} if signal == PUSH.value else wanted
        return found + [f"rule 3: nothing is published to {name}" for name in missing]

    def waiting(self, source: int) -> list[str]:
        """Rule 4: acquire loads at system scope; barrier and full proxy fence between them and the next bulk load."""
        program, polls = self.program, self.program.where(self.poll)
        if source == ORDER.value:
            used = program.where(lambda i: i.opcode.startswith(_ACCESSES) and program.memory(i).startswith("inbox."))
            return [f"rule 4: a kernel that waits for nothing has `{i}`" for i in used]
        found = [] if polls else ["rule 4: no acquire load polls"]
        wanted = {"ld", "acquire", "sys"}
        found += [f"rule 4: `{i}` is no acquire load.sys" for i in polls if not wanted <= set(i.opcode.split("."))]
        ordering = [self.barrier, self.proxy_fence]
        found += self._paths("rule 4", "no barrier after the poll", self.poll, ordering[:1], self.bulk_load)
        found += self._paths("rule 4", "no proxy fence after the poll", self.poll, ordering, self.bulk_load)
        loads = {i.index for i in program.where(self.bulk_load)}
        found += [f"rule 4: no bulk load comes after `{i}` in its role" for i in polls if not loads & program.after(i)]
        return found

    def epoch(self, source: int, signal: int) -> list[str]:
        """Rule 6: the epoch is loaded from memory in each role that uses it, before anything of the protocol."""
        loads = self.program.where(self.access("control.epoch", opcode="ld."))
        found = [] if loads else ["rule 6: the epoch is not loaded from memory"]
        uses = [self.poll] if source != ORDER.value else []
        uses += [self.publish] if signal != SILENT.value else []
        for start in self.program.roles or [0]:
            early = [self.program.instructions[n] for n in self.program.reached([start], stop=lambda i: i in loads)]
            found += [f"rule 6: `{i}` before the epoch is loaded" for use in uses for i in early if use(i)]
        return found

    def bounded_waits(self, source: int) -> list[str]:
        """Rule 7: every loop that polls reads the clock and the abort word, and can raise the abort on every device."""
        program = self.program
        clocks = {i.index for i in program.where(lambda i: "%globaltimer" in i.operands)}
        if source == ORDER.value:
            return ["rule 7: a clock is read where nothing waits"] if clocks else []
        needed = {
            "a look at the clock": clocks,
            "a look at the abort word": {i.index for i in program.where(self.access("control.abort", opcode="ld."))},
            "a record": {i.index for i in program.where(self.access("control.record", opcode="st."))},
            "raising the abort": {i.index for i in program.where(self.access("*control.abort_words", opcode="atom."))},
        }
        polls = [(poll, program.after(poll, stop=self.bulk_load)) for poll in program.where(self.poll)]
        return [f"rule 7: `{poll}` waits without {w}" for poll, loop in polls for w in needed if not loop & needed[w]]

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
        changing = {"globaltimer", "volatile *control.abort"}
        found = []
        for branch in program.where(lambda i: i.opcode.startswith("bra") and bool(changing & program.origins(i.guard))):
            split = {program.instructions[n] for n in program.between_split_and_join(branch)}
            found += [f"`{i}` is met by some warps only, after `{branch}`" for i in split if self.barrier(i)]
        return found


def split_barriers(ptx: str) -> list[str]:
    """Barriers of the CTA that its warps may not all reach (the classical kernel; roles of one warp are safe)."""
    return _Rules(Program(ptx, parameter_names(stamps=False)), cta_wide=True).split_barriers()
