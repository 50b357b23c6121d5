"""The byte layout of all protocol memory, for every device; nobody else computes an offset.

Per stage, on the stage's device: its own words. Per edge: the dependency array on the producer's device, the ring on
the consumer's, and the scoreboard with whoever reads it: the producer (queue signalling: it pushes a group when its
counter completes) or the consumer (counter signalling: it polls the counter). docs/protocol.md says why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilerelay.errors import InvalidInput
from tilerelay.graph.placement import Placement
from tilerelay.graph.tiling import Int32s, row_panel_order
from tilerelay.graph.workload import Edge, Workload

SIGNALLINGS = ("queue", "counter")
ALIGNMENT = 128  # bytes: no two fields share a cache line
SEPARATE = 32  # int32 words between counters that different devices write
WARPGROUPS = 2  # of a CTA, at most: each hands its own part of a sum over

# The host-visible error record of a stage, int32 words in this order (see kernels.protocol._end_run).
RECORD_FIELDS = ("raised", "stage", "ticket", "tile", "counter", "have", "want", "epoch")
RECORD_WORDS = 16


def wrap32(value: int | NDArray[np.int64]) -> NDArray[np.int32]:
    """int32 two's complement of a count that may have wrapped."""
    return np.asarray(value, dtype=np.int64).astype(np.uint64).astype(np.uint32).astype(np.int32)


@dataclass(frozen=True)
class Field:
    """One array in a device's protocol memory; `initial(epoch)` are its contents before the run of that epoch.

    None: whatever is there; these fields lie behind all others.
    """

    device: int
    offset: int
    dtype: np.dtype[Any]
    count: int
    initial: Callable[[int], NDArray[np.generic]] | None

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize


@dataclass(frozen=True)
class EdgeNumbers:
    """The integers that index an edge's ring and scoreboard.

    Attributes:
        entries: entries pushed per epoch.
        ring_mask: ring capacity - 1; the capacity is a power of two and holds an epoch.
        group_size: tickets per entry (1 when entries are tiles).
        largest_group: most tiles in a group.
        group_entries: an entry names a group; else a tile.
    """

    entries: int
    ring_mask: int
    group_size: int
    largest_group: int
    group_entries: bool


NO_EDGE = EdgeNumbers(entries=1, ring_mask=0, group_size=1, largest_group=1, group_entries=True)

# The integers of a stage that its kernel reads from memory, in this order (see ProtocolLayout.stage_numbers).
STAGE_NUMBERS = (
    "stage", "tickets", "tiles_n", "n", "k", "in_entries", "in_mask", "in_group", "in_steps",
    "out_mask", "out_group", "under_way",
)  # fmt: skip


class ProtocolLayout:
    """Where everything is, for one workload, placement and signalling.

    Raises:
        InvalidInput: unknown signalling, a placement for another number of stages, or with queues a walk, turns or
            steps.
    """

    def __init__(self, workload: Workload, placement: Placement, signalling: str) -> None:
        if signalling not in SIGNALLINGS:
            raise InvalidInput(f"unknown signalling {signalling!r}; choose one of {', '.join(SIGNALLINGS)}")
        if len(placement.stages) != len(workload.stages):
            raise InvalidInput(
                f"{len(placement.stages)} stages are placed, the workload has {len(workload.stages)}: place every stage"
            )
        self.workload = workload
        self.placement = placement
        self.signalling = signalling
        for index, placed in enumerate(workload.stages):
            if placed.walk and signalling == "queue" and self.in_edges(index):
                raise InvalidInput(f"stage {placed.name} has a walk, but its queue says what it computes: use counters")
            if placed.under_way and signalling == "queue":
                raise InvalidInput(
                    f"stage {placed.name} sends its tiles in turn, but queues know no turns: use counters"
                )
        for edge in workload.edges:
            if edge.dependencies.num_steps > 1 and signalling == "queue":
                name = workload.stages[edge.consumer].name
                raise InvalidInput(
                    f"stage {name} reads its inputs in steps, but queues know whole groups: use counters"
                )
        self._together = [self._sharers(edge) for edge in workload.edges]
        self._sizes = dict.fromkeys(placement.devices, 0)
        self._fields: dict[tuple[str, int, str], Field] = {}
        for stage in range(len(workload.stages)):
            self._add_stage(stage)
        for index, edge in enumerate(workload.edges):
            self._add_edge(index, edge)
        self._image_sizes = dict(self._sizes)
        for index, placed in enumerate(workload.stages):
            if placed.walk:
                count = placed.walk.places * placed.grid.block_m * placed.grid.block_n
                self._add("stage", index, "sums", placement.device_of(index), np.float32, count, None)

    @property
    def stride(self) -> int:
        """int32 words between counters."""
        return SEPARATE if any(len(together) > 1 for together in self._together) else 1

    @property
    def devices(self) -> tuple[int, ...]:
        return self.placement.devices

    def stage_field(self, stage: int, name: str) -> Field:
        return self._fields["stage", stage, name]

    def edge_field(self, edge: int, name: str) -> Field:
        return self._fields["edge", edge, name]

    def size(self, device: int) -> int:
        """Bytes of protocol memory on a device."""
        return self._sizes[device]

    def image(self, device: int, epoch: int = 1) -> NDArray[np.uint8]:
        """The protocol memory of a device before the run of `epoch`, up to what may hold anything."""
        image = np.zeros(self._image_sizes[device], dtype=np.uint8)
        for field in self._fields.values():
            if field.device == device and field.initial:
                contents = np.ascontiguousarray(np.broadcast_to(field.initial(epoch), field.count), dtype=field.dtype)
                image[field.offset : field.offset + field.nbytes] = contents.view(np.uint8)
        return image

    def _sharers(self, edge: Edge) -> list[int]:
        """Edges that count in one scoreboard: the same consumer, which polls it, and the same groups of its tiles."""
        if self.signalling == "queue":
            return [self.workload.edges.index(edge)]
        d = edge.dependencies
        return [
            i
            for i, other in enumerate(self.workload.edges)
            if other.consumer == edge.consumer
            and np.array_equal(other.dependencies.members, d.members)
            and np.array_equal(other.dependencies.member_offsets, d.member_offsets)
            and other.dependencies.steps == d.steps
        ]

    def stage_numbers(self, stage: int) -> tuple[int, ...]:
        """What a stage's kernel reads of its grid and of its rings, in the order of STAGE_NUMBERS."""
        placed = self.workload.stages[stage]
        into, out = self.in_edges(stage), self.out_edges(stage)
        incoming = self.edge_numbers(into[0]) if into else NO_EDGE
        outgoing = self.edge_numbers(out[0]) if out else NO_EDGE
        steps = self.workload.edges[into[0]].dependencies.num_steps if into else 1
        return (
            stage, self.tickets(stage), placed.grid.cols, placed.grid.n, placed.k,
            incoming.entries, incoming.ring_mask, incoming.group_size, steps,
            outgoing.ring_mask, outgoing.largest_group, placed.under_way or 0,
        )  # fmt: skip

    def tickets(self, stage: int) -> int:
        """How many tickets the CTAs of a stage take in a run: one for each tile, or for each piece of a walk."""
        placed = self.workload.stages[stage]
        return placed.walk.tickets if placed.walk else placed.grid.tiles

    def check_kernels_can(self) -> None:
        """The reference executor runs any graph; kernels have one place to poll, and one ring to push into.

        Raises:
            InvalidInput: a stage polls several scoreboards or rings, or pushes into several rings.
        """
        for index, stage in enumerate(self.workload.stages):
            into, out = self.in_edges(index), self.out_edges(index)
            polled = {self._together[e][0] for e in into}
            if len(polled) > 1:
                raise InvalidInput(
                    f"stage {stage.name} reads from several stages; kernels can do that with signalling='counter' "
                    f"where all of them feed the same groups of tiles"
                )
            if self.signalling == "queue" and len(out) > 1:
                raise InvalidInput(f"stage {stage.name} has several readers; use signalling='counter' for that")

    def counted_together(self, edge: int) -> list[int]:
        """Edges whose tiles are counted in one scoreboard with this edge's; with queues, this edge alone."""
        return self._together[edge]

    def in_edges(self, stage: int) -> list[int]:
        return [i for i, edge in enumerate(self.workload.edges) if edge.consumer == stage]

    def out_edges(self, stage: int) -> list[int]:
        return [i for i, edge in enumerate(self.workload.edges) if edge.producer == stage]

    def edge_numbers(self, edge: int) -> EdgeNumbers:
        dependencies = self.workload.edges[edge].dependencies
        uniform = dependencies.uniform_group_size
        entries = dependencies.num_groups if uniform else dependencies.num_consumers
        return EdgeNumbers(
            entries=entries,
            ring_mask=(1 << (entries - 1).bit_length()) - 1,
            group_size=uniform or 1,
            largest_group=int(np.diff(dependencies.member_offsets).max()),
            group_entries=uniform is not None,
        )

    def _add(
        self,
        kind: str,
        index: int,
        name: str,
        device: int,
        dtype: type[np.generic],
        count: int,
        initial: Callable[[int], object] | None,
    ) -> None:
        offset = self._sizes[device]
        contents = (lambda epoch: np.asarray(initial(epoch))) if initial else None
        field = Field(device, offset, np.dtype(dtype), count, contents)
        self._fields[kind, index, name] = field
        self._sizes[device] = -(-(offset + field.nbytes) // ALIGNMENT) * ALIGNMENT

    def _add_stage(self, index: int) -> None:
        stage, device = self.workload.stages[index], self.placement.device_of(index)

        def add(name: str, dtype: type[np.generic], count: int, initial: Callable[[int], object]) -> None:
            self._add("stage", index, name, device, dtype, count, initial)

        add("epoch", np.int32, 1, wrap32)
        add("finished", np.int32, 1, lambda _: 0)
        add("abort", np.int32, 1, lambda _: 0)
        add("wake", np.int32, 1, lambda epoch: wrap32(epoch - 1))
        order = row_panel_order(stage.grid) if stage.order is None else stage.order
        if stage.walk is None:
            add("order", np.int32, stage.grid.tiles, lambda _: order)
        else:
            walk = stage.walk
            add("order", np.int32, walk.tickets, lambda _: walk.tiles)
            add("pieces", np.int32, walk.pieces.size, lambda _: walk.pieces.reshape(-1))
            add("given", np.int32, walk.places * WARPGROUPS, lambda epoch: wrap32(epoch - 1))
        add("numbers", np.int32, len(STAGE_NUMBERS), lambda _: np.asarray(self.stage_numbers(index), dtype=np.int32))
        add("sent", np.int32, stage.grid.tiles, lambda epoch: wrap32(epoch - 1))
        add("published", np.int32, stage.grid.tiles, lambda epoch: wrap32(epoch - 1))

    def _add_edge(self, index: int, edge: Edge) -> None:
        d = edge.dependencies
        numbers = self.edge_numbers(index)
        producer, consumer = self.placement.device_of(edge.producer), self.placement.device_of(edge.consumer)

        def add(name: str, device: int, dtype: type[np.generic], count: int, initial: Callable[[int], object]) -> None:
            self._add("edge", index, name, device, dtype, count, initial)

        add("offsets", producer, np.int32, len(d.offsets), lambda _: d.offsets)
        add("counters", producer, np.int32, len(d.counters), lambda _: d.counters)
        shared = [self.workload.edges[e].dependencies.need for e in self._together[index]]
        need: Int32s = np.sum(shared, axis=0, dtype=np.int32)
        add("need", producer, np.int32, len(need), lambda _: need)
        add("member_offsets", producer, np.int32, d.num_groups + 1, lambda _: d.member_offsets)
        add("members", producer, np.int32, d.num_consumers, lambda _: d.members)
        add("tail", producer, np.int32, 1, lambda epoch: wrap32((epoch - 1) * numbers.entries))
        add("consumer_need", consumer, np.int32, len(need), lambda _: need)
        steps = d.steps or (self.workload.stages[edge.consumer].k,)
        add("steps", consumer, np.int32, len(steps), lambda _: np.asarray(steps))
        add("group_of", consumer, np.int32, d.num_consumers, lambda _: d.group_of)
        # An entry of the epoch before the first one: no slot may look filled.
        add("ring", consumer, np.int64, numbers.ring_mask + 1, lambda epoch: wrap32(epoch - 1).astype(np.int64) << 32)
        if self._together[index][0] < index:
            self._fields["edge", index, "scoreboard"] = self.edge_field(self._together[index][0], "scoreboard")
            return
        add(
            "scoreboard",
            producer if self.signalling == "queue" else consumer,
            np.int32,
            len(need) * self.stride,
            lambda epoch: np.repeat(wrap32((epoch - 1) * need.astype(np.int64)), self.stride),
        )
