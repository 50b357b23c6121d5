"""The truth beside the protocol: what was computed, published and pushed in which run; raises when a rule is broken."""

from __future__ import annotations

from collections.abc import Callable

from tilerelay.graph.workload import Workload


class InvariantBroken(AssertionError):
    """A step of the protocol broke one of its invariants."""


class Ledger:
    """The last run (0, 1, ...; -1: none) in which each tile was started, finished, published and pushed.

    Plain Python numbers that never wrap, kept apart from the protocol's own memory. Every method raises
    `InvariantBroken`, naming the tile.

    Attributes:
        counted: [edges][counters] lists of producer tiles.
    """

    def __init__(self, workload: Workload, device_of: Callable[[int], int]) -> None:
        self._edges = workload.edges
        self._is_elsewhere = [device_of(edge.producer) != device_of(edge.consumer) for edge in workload.edges]
        self._stages = workload.stages
        self._started, self._finished, self._sent, self._published = (
            [[-1] * stage.grid.tiles for stage in workload.stages] for _ in range(4)
        )
        self._pushed = [[-1] * edge.dependencies.num_consumers for edge in workload.edges]
        self._sums: dict[tuple[int, int], tuple[int, int]] = {}
        self._slots: list[dict[int, tuple[int, list[int]]]] = [{} for _ in workload.edges]
        dependencies = [edge.dependencies for edge in workload.edges]
        self.counted = [[d.counted_by(counter) for counter in range(len(d.need))] for d in dependencies]
        self._readers = [
            [[t for g in d.groups_of_producer(p) for t in d.members_of(g)] for p in range(d.num_producers)]
            for d in dependencies
        ]

    def start(self, stage: int, tile: int, run: int) -> None:
        """Once per run, after its first step's inputs, and after the last run's readers of what it overwrites."""
        self._check(self._started[stage][tile] == run - 1, stage, tile, f"is not computed exactly once in run {run}")
        self._started[stage][tile] = run
        self._inputs_there(stage, tile, run)
        for index, edge in enumerate(self._edges):
            if edge.producer == stage:
                for reader in self._readers[index][tile]:
                    read = self._finished[edge.consumer][reader] >= run - 1
                    self._check(read, stage, tile, f"is overwritten while {self._name(edge.consumer, reader)} reads it")

    def _inputs_there(self, stage: int, tile: int, run: int) -> None:
        for index, edge in enumerate(self._edges):
            if edge.consumer == stage:
                self.read(index, tile, 0, run)

    def read(self, edge: int, tile: int, step: int, run: int) -> None:
        """A step of a consumer tile's sum reads what the edge's producer has finished."""
        producer, consumer, d = self._edges[edge].producer, self._edges[edge].consumer, self._edges[edge].dependencies
        for p in self.counted[edge][d.group_of[tile] * d.num_steps + step]:
            made = self._sent if self._is_elsewhere[edge] else self._finished
            there = made[producer][p] == run
            self._check(there, consumer, tile, f"starts before {self._name(producer, p)} is finished")

    def begin_sum(self, stage: int, tile: int, place: int, run: int) -> None:
        """The first piece of a tile's sum lies in a place from now on; nobody else's lies there."""
        self._inputs_there(stage, tile, run)
        other, last_run = self._sums.get((stage, place), (tile, -1))
        self._check(last_run < run, stage, tile, f"begins its sum where that of tile {other} lies")
        self._sums[stage, place] = (tile, run)

    def take_sum(self, stage: int, tile: int, place: int, run: int) -> None:
        """The second piece continues what the first one has left in that place in this run."""
        begun = self._sums.get((stage, place)) == (tile, run)
        self._check(begun, stage, tile, "continues a sum before it is begun")

    def finish(self, stage: int, tile: int, run: int, *, here_alone: bool = False) -> None:
        """The tile's stores are complete: all of them, or those on its own device, before the others are sent."""
        self._finished[stage][tile] = run
        if not here_alone:
            self._sent[stage][tile] = run

    def publish(self, stage: int, tile: int, run: int) -> None:
        """The tile's epilogue begins."""
        self._check(self._finished[stage][tile] == run, stage, tile, "is published before it is finished")
        self._published[stage][tile] = run

    def count(self, edge: int, counter: int, surplus: int) -> None:
        """A counter was added to; `surplus`: its value less epoch * need."""
        tile = self._edges[edge].dependencies.members_of(counter // self._edges[edge].dependencies.num_steps)[0]
        self._check(surplus <= 0, self._edges[edge].consumer, tile, f"has a counter {surplus} above epoch * need")

    def push(self, edge: int, group: int, tiles: list[int], slot: int, run: int) -> None:
        """An entry for `tiles` of a group is about to be written: once per run, complete, into a slot that is free."""
        producer, consumer = self._edges[edge].producer, self._edges[edge].consumer
        for tile in tiles:
            self._check(self._pushed[edge][tile] == run - 1, consumer, tile, f"is not pushed exactly once in run {run}")
            self._pushed[edge][tile] = run
            for p in self.counted[edge][group]:
                there = self._published[producer][p] == run
                self._check(there, consumer, tile, f"is pushed before {self._name(producer, p)} is published")
        last_run, last_tiles = self._slots[edge].get(slot, (-1, []))
        for tile in last_tiles:  # its roles may look at the entry until the tile is stored
            done = self._finished[consumer][tile] >= last_run
            self._check(done, consumer, tile, f"loses its entry in ring slot {slot} before it is finished")
        self._slots[edge][slot] = (run, tiles)

    def all_done(self, runs: int) -> None:
        """Nothing is missing after so many runs."""
        for stage, tiles in enumerate(self._finished):
            for tile, run in enumerate(tiles):
                self._check(run == runs - 1, stage, tile, f"was last computed in run {run} of 0..{runs - 1}")

    def _name(self, stage: int, tile: int) -> str:
        return f"tile {tile} of {self._stages[stage].name}"

    def _check(self, holds: bool, stage: int, tile: int, what: str) -> None:
        if not holds:
            raise InvariantBroken(f"{self._name(stage, tile)} {what}")
