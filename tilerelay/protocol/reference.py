"""The slow reference executor: the protocol step by step on the CPU, the oracle of kernels and simulator.

Every CTA is an agent, a generator that yields before each access to memory that others share; a seeded scheduler picks
whose turn it is. Protocol memory is that of `ProtocolLayout`, with the kernels' int32 arithmetic; the `Ledger` beside
it checks every step. docs/protocol.md is the specification, and numbers the rules.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilerelay.errors import InvalidInput, PipelineAborted
from tilerelay.graph.placement import Placement
from tilerelay.graph.workload import Workload
from tilerelay.protocol.layout import WARPGROUPS, Field, ProtocolLayout, wrap32
from tilerelay.protocol.ledger import InvariantBroken, Ledger

# How likely the scheduler is to change its preferences before a step. "random" always does; "adversarial" lets some
# agents sleep for long, in the middle of whatever they do, while all others run ahead.
SCHEDULERS = {"random": 1.0, "adversarial": 0.02}
FAULTS = (
    "lose_publish", "publish_twice", "publish_early", "skip_wait", "skip_reuse_wait", "skip_sum_wait", "skip_step_wait",
    "lose_turn", "announce_unsent",
)  # fmt: skip


@dataclass(frozen=True)
class Event:
    """A tile was "started" or "finished"; `step` counts the scheduler's choices, `epoch` is the word in memory."""

    step: int
    stage: int
    tile: int
    worker: int
    epoch: int
    what: str


@dataclass(frozen=True)
class Fault:
    """A mistake made on purpose in every run by whoever holds the ticket (`skip_reuse_wait`: by the whole stage)."""

    kind: str
    stage: int
    ticket: int = 0


@dataclass(frozen=True)
class Wait:
    """What an agent waits for; `describe` is asked only when nobody can go on."""

    ready: Callable[[], bool]
    describe: Callable[[], str]


Agent = Generator[Wait | None, None, None]


def word(value: int) -> int:
    """A count as the int32 that the device sees."""
    return int(wrap32(value))


class Memory:
    """All devices' protocol memory before the run of `epoch`, and every field of it as an array."""

    def __init__(self, layout: ProtocolLayout, epoch: int) -> None:
        self._layout = layout
        self._images = {device: layout.image(device, epoch) for device in layout.devices}

    def stage(self, stage: int, name: str) -> NDArray[Any]:
        return self._view(self._layout.stage_field(stage, name))

    def edge(self, edge: int, name: str) -> NDArray[Any]:
        return self._view(self._layout.edge_field(edge, name))

    def _view(self, field: Field) -> NDArray[Any]:
        return self._images[field.device][field.offset : field.offset + field.nbytes].view(field.dtype)


class ReferenceExecutor:
    """The agents of all stages for one workload on one protocol memory; see `run`."""

    def __init__(
        self, layout: ProtocolLayout, workers: Sequence[int], *, epochs: int, first_epoch: int, fault: Fault | None
    ) -> None:
        stages, edges = layout.workload.stages, layout.workload.edges
        if len(workers) != len(stages) or min(workers) < 1:
            raise InvalidInput(f"workers={list(workers)}: give a positive number for each of the {len(stages)} stages")
        if fault is not None and fault.kind not in FAULTS:
            raise InvalidInput(f"unknown fault {fault.kind!r}; choose one of {', '.join(FAULTS)}")
        self.memory, self.ledger = Memory(layout, first_epoch), Ledger(layout.workload, layout.placement.device_of)
        self.events: list[Event] = []
        self._layout, self._stages, self._edges, self._workers = layout, stages, edges, workers
        self._queue = layout.signalling == "queue"
        self._epochs, self._first_epoch, self._fault = epochs, first_epoch, fault
        self._numbers = [layout.edge_numbers(e) for e in range(len(edges))]
        self._inputs = [[i for i, e in enumerate(edges) if e.consumer == s] for s in range(len(stages))]
        self._outputs = [[i for i, e in enumerate(edges) if e.producer == s] for s in range(len(stages))]
        self._runs_done = [0] * len(stages)
        self._step = 0

    def execute(self, rng: random.Random, change: float) -> None:
        """Let the agents take turns until all are done. Raises as `run` does."""
        agents = [self._worker(stage, worker) for stage, count in enumerate(self._workers) for worker in range(count)]
        rng.shuffle(agents)
        pending: dict[Agent, Wait | None] = dict.fromkeys(agents)
        while agents:
            if rng.random() < change:
                rng.shuffle(agents)
            able = next((a for a in agents if (wait := pending[a]) is None or wait.ready()), None)
            if able is None:
                waits = sorted(wait.describe() for a in agents if (wait := pending[a]))
                raise PipelineAborted("deadlock, nobody can go on:\n" + "\n".join(waits), waits)
            self._step += 1
            try:
                pending[able] = next(able)
            except StopIteration:
                agents.remove(able)

    def check_end(self) -> None:
        """Memory after the last run is that before the next one, in all fields that the signalling uses.

        Raises:
            InvariantBroken: it is not.
        """
        self.ledger.all_done(self._epochs)
        fresh = Memory(self._layout, self._first_epoch + self._epochs)
        for s in range(len(self._stages)):
            used = ["epoch", "finished", "abort"]
            used += ["given"] if self._stages[s].walk else []
            used += ["sent"] if self._stages[s].under_way else []
            used += ["published"] if self._outputs[s] else []
            used += ["wake"] if self._queue and self._inputs[s] else []
            for name in used:
                _expect_equal(f"{self._stages[s].name}: {name}", self.memory.stage(s, name), fresh.stage(s, name))
        for e, edge in enumerate(self._edges):
            for name in ["scoreboard", "tail"] if self._queue else ["scoreboard"]:
                where = f"{self._stages[edge.producer].name} -> {self._stages[edge.consumer].name}: {name}"
                counters = slice(None, None, self._layout.stride)
                _expect_equal(where, self.memory.edge(e, name)[counters], fresh.edge(e, name)[counters])

    def _worker(self, stage: int, worker: int) -> Agent:
        """One CTA: the persistent kernel's walk over tickets, launched anew for every run."""
        for run in range(self._epochs):
            yield self._launchable(stage, run)
            epoch = int(self.memory.stage(stage, "epoch")[0])
            for ticket in range(worker, self._layout.tickets(stage), self._workers[stage]):
                if self._is_empty(stage, ticket):
                    continue
                tile = yield from self._prologue(stage, ticket, epoch)
                yield from self._later_steps(stage, ticket, tile, epoch, run)
                if not (yield from self._ends_sum(stage, ticket, tile, epoch, run)):
                    continue
                self.ledger.start(stage, tile, run)
                self.events.append(Event(self._step, stage, tile, worker, epoch, "started"))
                if self._makes("publish_early", stage, ticket):
                    yield from self._epilogue(stage, ticket, tile, epoch, run)
                yield None
                self.ledger.finish(stage, tile, run, here_alone=self._stages[stage].under_way is not None)
                self.events.append(Event(self._step, stage, tile, worker, epoch, "finished"))
                if not self._makes("lose_publish", stage, ticket):
                    yield from self._epilogue(stage, ticket, tile, epoch, run)
                if self._makes("publish_twice", stage, ticket):
                    yield from self._epilogue(stage, ticket, tile, epoch, run)
            yield None
            self._leave(stage, epoch)

    def _is_empty(self, stage: int, ticket: int) -> bool:
        walk = self._stages[stage].walk
        return walk is not None and bool(walk.pieces[ticket, 0] == walk.pieces[ticket, 1])

    def _ends_sum(self, stage: int, ticket: int, tile: int, epoch: int, run: int) -> Generator[Wait | None, None, bool]:
        """Take a tile's sum over or hand it over, where its CTAs share it; whether this ticket ends the sum."""
        placed = self._stages[stage]
        if placed.walk is None:
            return True
        begin, end, place = placed.walk.pieces[ticket].tolist()
        given = self.memory.stage(stage, "given")[place * WARPGROUPS : (place + 1) * WARPGROUPS]
        if begin > 0:
            if not self._makes("skip_sum_wait", stage, ticket):
                who = f"{placed.name}, tile {tile} waits for the first piece of its sum"
                yield Wait(lambda: bool((given == epoch).all()), lambda: who)
            self.ledger.take_sum(stage, tile, place, run)
        if end < placed.k:
            self.ledger.begin_sum(stage, tile, place, run)
            yield None
            given[:] = epoch
        return bool(end == placed.k)

    def _makes(self, kind: str, stage: int, ticket: int = 0) -> bool:
        return self._fault == Fault(kind, stage, ticket)

    def _launchable(self, stage: int, run: int) -> Wait:
        """Rule 9: a stage is launched again when its own last run and its readers' last run are done."""
        readers = (
            [] if self._makes("skip_reuse_wait", stage) else [self._edges[e].consumer for e in self._outputs[stage]]
        )

        def late() -> list[str]:
            return [self._stages[s].name for s in [stage, *readers] if self._runs_done[s] < run]

        name = self._stages[stage].name
        return Wait(lambda: not late(), lambda: f"{name}, run {run} waits for the end of run {run - 1} of {late()}")

    def _leave(self, stage: int, epoch: int) -> None:
        """The last CTA of a run moves the stage to the next epoch."""
        finished = self.memory.stage(stage, "finished")
        finished[0] += 1
        if finished[0] == self._workers[stage]:
            finished[0] = 0
            self.memory.stage(stage, "epoch")[0] = word(epoch + 1)
            self._runs_done[stage] += 1

    def _prologue(self, stage: int, ticket: int, epoch: int) -> Generator[Wait | None, None, int]:
        """Returns the ticket's tile when every in-edge says that it is ready; the first one's queue gives the order."""
        inputs = self._inputs[stage]
        waits = not self._makes("skip_wait", stage, ticket)
        if inputs and self._queue:
            first, inputs = inputs[0], inputs[1:]
            numbers, ring = self._numbers[first], self.memory.edge(first, "ring")
            slot = word((epoch - 1) * numbers.entries + ticket // numbers.group_size) & numbers.ring_mask
            if waits:
                who = f"{self._stages[stage].name}, ticket {ticket}"
                groups = range(len(self.ledger.counted[first]))
                describe = lambda: f"{who} waits for {self._missing(first, groups, epoch)}"
                yield Wait(lambda: int(ring[slot]) >> 32 == epoch, describe)
            tile = word(int(ring[slot])) * numbers.group_size + ticket % numbers.group_size
        else:
            tile = int(self.memory.stage(stage, "order")[ticket])
        for edge in inputs if waits else []:
            yield self._edge_ready(edge, tile, 0, epoch)
        return tile

    def _later_steps(self, stage: int, ticket: int, tile: int, epoch: int, run: int) -> Agent:
        """The load role comes to the later steps of its piece of the tile's sum, and waits for their inputs."""
        placed = self._stages[stage]
        end = placed.k if placed.walk is None else int(placed.walk.pieces[ticket, 1])
        for edge in self._inputs[stage]:
            steps = self._edges[edge].dependencies.steps
            for step in range(1, len(steps)):
                if steps[step - 1] < end:
                    if not self._makes("skip_step_wait", stage, ticket):
                        yield self._edge_ready(edge, tile, step, epoch)
                    self.ledger.read(edge, tile, step, run)

    def _edge_ready(self, edge: int, tile: int, step: int, epoch: int) -> Wait:
        """Counter signalling: the step's counter; queue signalling: the tile's entry, wherever in the ring it is."""
        numbers, dependencies = self._numbers[edge], self._edges[edge].dependencies
        counter = int(self.memory.edge(edge, "group_of")[tile]) * dependencies.num_steps + step
        who = f"{self._stages[self._edges[edge].consumer].name}, tile {tile}"
        describe = lambda: f"{who} waits for {self._missing(edge, [counter], epoch)}"
        if self._queue:
            ring, entry = self.memory.edge(edge, "ring"), (epoch << 32) | tile // numbers.group_size
            return Wait(lambda: entry in ring, describe)
        scoreboard, at = self.memory.edge(edge, "scoreboard"), counter * self._layout.stride
        want = epoch * int(self.memory.edge(edge, "consumer_need")[counter])
        return Wait(lambda: word(int(scoreboard[at]) - want) >= 0, describe)

    def _missing(self, edge: int, counters: Sequence[int], epoch: int) -> str:
        """What the counters still count, from the words that kernels keep, too; any may be the one waited for."""
        found = []
        for e in self._layout.counted_together(edge):
            stage, steps = self._edges[e].producer, self._edges[e].dependencies.num_steps
            published = self.memory.stage(stage, "published")
            for counter in counters:
                tiles = [p for p in self.ledger.counted[e][counter] if published[p] != epoch]
                where = f"group {counter // steps}" + (f", step {counter % steps}" if steps > 1 else "")
                found += [f"tiles {tiles} of {self._stages[stage].name} ({where})"] if tiles else []
        return ", or ".join(found) or "a signal that was lost: all its prerequisites are published"

    def _epilogue(self, stage: int, ticket: int, tile: int, epoch: int, run: int) -> Agent:
        """Announce a tile; in turn: on its own device at once, elsewhere when it has been sent."""
        if not self._outputs[stage]:
            return
        device_of = self._layout.placement.device_of
        here = [e for e in self._outputs[stage] if device_of(self._edges[e].consumer) == device_of(stage)]
        self.ledger.publish(stage, tile, run)
        if self._stages[stage].under_way:
            early = self._outputs[stage] if self._makes("announce_unsent", stage, ticket) else here
            for edge in early:
                yield from self._count(edge, tile, epoch, run)
            yield from self._send(stage, ticket, tile, epoch)
            self.ledger.finish(stage, tile, run)
            here = early
        self.memory.stage(stage, "published")[tile] = epoch
        for edge in self._outputs[stage]:
            if not self._stages[stage].under_way or edge not in here:
                yield from self._count(edge, tile, epoch, run)

    def _send(self, stage: int, ticket: int, tile: int, epoch: int) -> Agent:
        """Wait for the tile's turn, and let the one after it go."""
        sent, order = self.memory.stage(stage, "sent"), self.memory.stage(stage, "order")
        before = ticket - (self._stages[stage].under_way or 0)
        if before >= 0:
            earlier = int(order[before])
            who = f"{self._stages[stage].name}, tile {tile} waits for its turn after tile {earlier}"
            yield Wait(lambda: bool(sent[earlier] == epoch), lambda: who)
        yield None
        if not self._makes("lose_turn", stage, ticket):
            sent[tile] = epoch

    def _count(self, edge: int, tile: int, epoch: int, run: int) -> Agent:
        """Add one to every counter that counts the tile; who completes a group pushes it (queue signalling)."""
        offsets, scoreboard = self.memory.edge(edge, "offsets"), self.memory.edge(edge, "scoreboard")
        for counter in self.memory.edge(edge, "counters")[offsets[tile] : offsets[tile + 1]].tolist():
            yield None
            at = counter * self._layout.stride
            scoreboard[at] = word(int(scoreboard[at]) + 1)
            surplus = word(int(scoreboard[at]) - epoch * int(self.memory.edge(edge, "need")[counter]))
            self.ledger.count(edge, counter, surplus)
            if self._queue and surplus == 0:
                yield from self._push(edge, counter, epoch, run)

    def _push(self, edge: int, group: int, epoch: int, run: int) -> Agent:
        """Reserve slots of the ring, write the group's entry, or one for each of its tiles, and wake the consumer."""
        numbers, ring, tail = self._numbers[edge], self.memory.edge(edge, "ring"), self.memory.edge(edge, "tail")
        first, end = self.memory.edge(edge, "member_offsets")[group : group + 2]
        tiles = self.memory.edge(edge, "members")[first:end].tolist()
        entries = [(group, tiles)] if numbers.group_entries else [(tile, [tile]) for tile in tiles]
        yield None
        start = int(tail[0])
        tail[0] = word(start + len(entries))
        for i, (name, covered) in enumerate(entries):
            yield None
            slot = (start + i) & numbers.ring_mask
            self.ledger.push(edge, group, covered, slot, run)
            ring[slot] = (epoch << 32) | name
        yield None
        self.memory.stage(self._edges[edge].consumer, "wake")[0] = epoch


def _expect_equal(where: str, found: NDArray[Any], expected: NDArray[Any]) -> None:
    if not np.array_equal(found, expected):
        raise InvariantBroken(f"{where} is {found} at the end, not {expected}")


def run(
    workload: Workload,
    placement: Placement,
    signalling: str,
    workers: Sequence[int],
    *,
    seed: int = 0,
    scheduler: str = "random",
    epochs: int = 1,
    first_epoch: int = 1,
    fault: Fault | None = None,
) -> list[Event]:
    """Run the protocol and return what happened, in the order of the steps.

    Args:
        workers: CTAs of each stage: its SM share for a persistent kernel, its tiles for a classical one.
        scheduler: "random" or "adversarial" (see SCHEDULERS).
        epochs: runs in a row on the same memory; stages are in different runs at once as far as rule 9 allows.
        first_epoch: number of the first run.
        fault: a mistake to make, to show that it is caught.

    Raises:
        InvalidInput: workers, scheduler, fault or signalling that do not exist or do not fit.
        InvariantBroken: a step, or the memory at the end, broke the protocol.
        PipelineAborted: a deadlock; names who waits for which missing producer tiles.
    """
    if scheduler not in SCHEDULERS:
        raise InvalidInput(f"unknown scheduler {scheduler!r}; choose one of {', '.join(SCHEDULERS)}")
    layout = ProtocolLayout(workload, placement, signalling)
    executor = ReferenceExecutor(layout, workers, epochs=epochs, first_epoch=first_epoch, fault=fault)
    executor.execute(random.Random(seed), SCHEDULERS[scheduler])
    executor.check_end()
    return executor.events
