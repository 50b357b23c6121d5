"""Tile dependencies between two stages: which consumer tiles wait for which producer tiles.

Consumer tiles that share their prerequisites form a *group* with one counter (all tiles of a row panel, for a
GEMM). The paper's general case, one counter per consumer tile, is the same structure with groups of one. A group whose
tiles read their inputs in *steps*, one stretch of the sum after the other, has a counter for each step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilerelay.errors import InvalidInput
from tilerelay.graph.tiling import Int32s, TileGrid

Ids = Sequence[int] | NDArray[np.integer[Any]]


@dataclass(frozen=True, eq=False)
class TileDependencies:
    """Producer tiles -> counters of groups of consumer tiles, as CSR, with each group's member tiles.

    Counter `group * num_steps + step` is that of a step of a group; without steps, counters are groups.

    Attributes:
        offsets: [producers + 1]; producer tile p adds to the counters `counters[offsets[p]:offsets[p + 1]]`.
        counters: [edges] counter ids (the paper's dependency array, section III.A.1).
        need: [counters] number of producer tiles that a counter counts.
        member_offsets: [groups + 1]; consumer tiles of group g are `members[member_offsets[g]:member_offsets[g + 1]]`.
        members: [consumers] consumer tile ids.
        steps: where each step of a consumer tile's sum ends, in elements of k; empty: all of its inputs at once.
    """

    offsets: Int32s
    counters: Int32s
    need: Int32s
    member_offsets: Int32s
    members: Int32s
    steps: tuple[int, ...] = ()

    @property
    def num_producers(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_consumers(self) -> int:
        return len(self.members)

    @property
    def num_groups(self) -> int:
        return len(self.member_offsets) - 1

    @property
    def num_steps(self) -> int:
        return max(1, len(self.steps))

    @cached_property
    def group_of(self) -> Int32s:
        """[consumers] group of each consumer tile."""
        group_of = np.empty(self.num_consumers, dtype=np.int32)
        group_of[self.members] = np.repeat(np.arange(self.num_groups, dtype=np.int32), np.diff(self.member_offsets))
        return group_of

    @cached_property
    def uniform_group_size(self) -> int | None:
        """Tiles per group when group g is exactly tiles [g * size, (g + 1) * size), else None.

        Then a queue entry can name a group, and a ticket gives group and member.
        """
        size, rest = divmod(self.num_consumers, self.num_groups)
        contiguous = rest == 0 and np.array_equal(self.members, np.arange(self.num_consumers))
        return size if contiguous and bool((np.diff(self.member_offsets) == size).all()) else None

    def groups_of_producer(self, producer: int) -> list[int]:
        counters = self.counters[self.offsets[producer] : self.offsets[producer + 1]]
        return [int(group) for group in np.unique(counters // self.num_steps)]

    def members_of(self, group: int) -> list[int]:
        return [int(t) for t in self.members[self.member_offsets[group] : self.member_offsets[group + 1]]]

    def counted_by(self, counter: int) -> list[int]:
        """Producer tiles that add to a counter."""
        adds = np.flatnonzero(self.counters == counter)
        return [int(p) for p in np.searchsorted(self.offsets, adds, side="right") - 1]

    def prerequisites_of(self, group: int) -> list[int]:
        """Producer tiles that a group waits for, in all its steps."""
        counters = range(group * self.num_steps, (group + 1) * self.num_steps)
        return sorted({p for counter in counters for p in self.counted_by(counter)})

    def same_as(self, other: TileDependencies) -> bool:
        """The same arrays."""
        names = ("offsets", "counters", "need", "member_offsets", "members", "steps")
        return all(np.array_equal(getattr(self, name), getattr(other, name)) for name in names)

    def per_tile(self) -> TileDependencies:
        """The same dependencies with one counter for every consumer tile (the paper's general case).

        Raises:
            InvalidInput: tiles that take their sums in steps.
        """
        if self.steps:
            raise InvalidInput("tiles with steps share the counters of their group; make them per tile without steps")
        sizes = np.diff(self.member_offsets)
        producers = range(self.num_producers)
        fed = [[t for g in self.groups_of_producer(p) for t in self.members_of(g)] for p in producers]
        need = np.repeat(self.need, sizes)[np.argsort(self.members)]
        return _build(fed, need, [[t] for t in range(self.num_consumers)])


def from_prerequisites(
    num_producers: int, prerequisites: Sequence[Iterable[int]], *, grouped: bool = True
) -> TileDependencies:
    """Dependencies from any map: `prerequisites[c]` are the producer tiles that consumer tile c needs.

    Raises:
        InvalidInput: no consumer tile, one without prerequisites (nothing would start it), or a tile id out of range.
    """
    wanted = [tuple(sorted(set(p))) for p in prerequisites]
    if not wanted:
        raise InvalidInput("no consumer tiles; give the prerequisites of at least one")
    for consumer, tiles in enumerate(wanted):
        if not tiles:
            raise InvalidInput(f"consumer tile {consumer} has no prerequisites; every tile must depend on at least one")
        if tiles[0] < 0 or tiles[-1] >= num_producers:
            raise InvalidInput(f"consumer tile {consumer}: name producer tiles in 0..{num_producers - 1}, not {tiles}")
    members: dict[object, list[int]] = {}
    for consumer, tiles in enumerate(wanted):
        members.setdefault(tiles if grouped else consumer, []).append(consumer)
    fed: list[list[int]] = [[] for _ in range(num_producers)]
    need = []
    for group, tiles_of_group in enumerate(members.values()):
        prerequisites_of_group = wanted[tiles_of_group[0]]
        need.append(len(prerequisites_of_group))
        for producer in prerequisites_of_group:
            fed[producer].append(group)
    return _build(fed, need, list(members.values()))


def gemm_dependencies(
    producer: TileGrid, consumer: TileGrid, *, grouped: bool = True, steps: tuple[int, ...] = (), first_column: int = 0
) -> TileDependencies:
    """Closed form for a GEMM that reads the producer's output as its [M, K] operand, or as columns of it.

    A consumer tile of row panel r needs every producer tile of the panels that overlap r's rows (paper, III.B.1), in
    the steps whose columns it overlaps.

    Args:
        grouped: one counter per row panel, and step; False: one per consumer tile.
        steps: where each step of the consumer's sum ends, ascending, the last one at its k; of grouped tiles only.
        first_column: of the operand, that the producer makes.

    Raises:
        InvalidInput: the two outputs have different numbers of rows.
    """
    if producer.m != consumer.m:
        raise InvalidInput(
            f"the producer makes {producer.m} rows, the consumer reads {consumer.m}: give both the same m"
        )
    rows = np.arange(consumer.rows)
    first = rows * consumer.block_m // producer.block_m
    last = (np.minimum((rows + 1) * consumer.block_m, consumer.m) - 1) // producer.block_m
    per_panel = [np.flatnonzero((first <= p) & (p <= last)) for p in range(producer.rows)]
    if steps:
        return _stepped(producer, consumer, per_panel, steps, first_column)
    need = (last - first + 1) * producer.cols
    if not grouped:
        per_panel = [(panels[:, None] * consumer.cols + np.arange(consumer.cols)).reshape(-1) for panels in per_panel]
        need = np.repeat(need, consumer.cols)
    fed = [per_panel[p] for p in range(producer.rows) for _ in range(producer.cols)]
    size = consumer.cols if grouped else 1
    return _build(fed, need, list(np.arange(consumer.tiles).reshape(-1, size)))


def _stepped(
    producer: TileGrid, consumer: TileGrid, per_panel: Sequence[Ids], steps: tuple[int, ...], first_column: int
) -> TileDependencies:
    ends = np.asarray(steps)
    begins = np.concatenate([[0], ends[:-1]])
    fed: list[Ids] = []
    for tile in range(producer.tiles):
        row, _ = producer.coords(tile)
        left, right = (first_column + column for column in producer.extent(tile)[2:])
        overlapped = np.flatnonzero((begins < right) & (left < ends))
        fed.append((np.asarray(per_panel[row])[:, None] * len(steps) + overlapped).reshape(-1))
    need = np.bincount(np.concatenate([np.asarray(of) for of in fed]), minlength=consumer.rows * len(steps))
    return _build(fed, need, list(np.arange(consumer.tiles).reshape(-1, consumer.cols)), steps)


def _build(fed: Sequence[Ids], need: Ids, members: Sequence[Ids], steps: tuple[int, ...] = ()) -> TileDependencies:
    def csr(lists: Sequence[Ids]) -> tuple[Int32s, Int32s]:
        offsets = np.zeros(len(lists) + 1, dtype=np.int32)
        np.cumsum([len(entry) for entry in lists], out=offsets[1:])
        flat = np.concatenate([np.asarray(entry, dtype=np.int32) for entry in lists])
        return offsets, flat

    return TileDependencies(*csr(fed), np.asarray(need, dtype=np.int32), *csr(members), steps)
