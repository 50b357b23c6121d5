"""Protocol memory: where every field is, and what it holds before a run."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.protocol.graphs import EPOCHS, placements, workloads
from tilerelay.errors import InvalidInput, PlacementError
from tilerelay.graph.catalog import dense_chain
from tilerelay.graph.dependency import from_prerequisites
from tilerelay.graph.placement import pipelined, sharded
from tilerelay.graph.tiling import TileGrid, row_panel_order
from tilerelay.graph.workload import Edge, Stage, Workload
from tilerelay.protocol.layout import ALIGNMENT, SIGNALLINGS, Field, ProtocolLayout, wrap32

STAGE_FIELDS = ("epoch", "finished", "abort", "wake", "order", "numbers", "sent", "published")
PRODUCER_FIELDS = ("offsets", "counters", "need", "member_offsets", "members", "tail")
CONSUMER_FIELDS = ("consumer_need", "steps", "group_of", "ring")


@st.composite
def layouts(draw: st.DrawFn) -> ProtocolLayout:
    workload = draw(workloads())
    return ProtocolLayout(workload, draw(placements(len(workload.stages))), draw(st.sampled_from(SIGNALLINGS)))


def fields(layout: ProtocolLayout) -> list[Field]:
    stages, edges = range(len(layout.workload.stages)), range(len(layout.workload.edges))
    names = (*PRODUCER_FIELDS, *CONSUMER_FIELDS, "scoreboard")
    found = [layout.stage_field(s, n) for s in stages for n in STAGE_FIELDS]
    found += [layout.edge_field(e, n) for e in edges for n in names]
    return list({id(f): f for f in found}.values())  # edges of one consumer may share a scoreboard


def sharers(layout: ProtocolLayout, edge: Edge) -> list[Edge]:
    """Edges that feed the same groups of the same consumer: with counters, they count together."""
    if layout.signalling == "queue":
        return [edge]
    groups = lambda e: [e.dependencies.members_of(g) for g in range(e.dependencies.num_groups)]
    return [e for e in layout.workload.edges if e.consumer == edge.consumer and groups(e) == groups(edge)]


def contents(layout: ProtocolLayout, field: Field, epoch: int = 1) -> np.ndarray:  # type: ignore[type-arg]
    return layout.image(field.device, epoch)[field.offset : field.offset + field.nbytes].view(field.dtype)


@given(layouts())
def test_fields_do_not_share_cache_lines_and_fill_the_memory(layout: ProtocolLayout) -> None:
    for device in layout.devices:
        here = sorted((f for f in fields(layout) if f.device == device), key=lambda f: f.offset)
        end = 0
        for field in here:
            assert field.count > 0 and field.offset % ALIGNMENT == 0
            assert field.offset == -(-end // ALIGNMENT) * ALIGNMENT, "the list of fields in this test is not complete"
            end = field.offset + field.nbytes
        assert layout.size(device) == -(-end // ALIGNMENT) * ALIGNMENT
    assert {f.device for f in fields(layout)} == set(layout.devices)


@given(layouts())
def test_every_field_is_on_its_device(layout: ProtocolLayout) -> None:
    device_of = layout.placement.device_of
    for stage in range(len(layout.workload.stages)):
        assert {layout.stage_field(stage, name).device for name in STAGE_FIELDS} == {device_of(stage)}
    for index, edge in enumerate(layout.workload.edges):
        producer, consumer = device_of(edge.producer), device_of(edge.consumer)
        assert {layout.edge_field(index, name).device for name in PRODUCER_FIELDS} == {producer}
        assert {layout.edge_field(index, name).device for name in CONSUMER_FIELDS} == {consumer}
        # Whoever reads the counters has them: the pusher, or the consumer that polls them (rule 5).
        reader = producer if layout.signalling == "queue" else consumer
        assert layout.edge_field(index, "scoreboard").device == reader


@settings(deadline=None)  # the whole image of a device
@given(layouts(), st.sampled_from(EPOCHS))
def test_memory_before_a_run(layout: ProtocolLayout, epoch: int) -> None:
    last = wrap32(epoch - 1)
    for index, stage in enumerate(layout.workload.stages):
        expected = {
            "epoch": wrap32(epoch),
            "finished": 0,
            "abort": 0,
            "wake": last,
            "order": row_panel_order(stage.grid) if stage.order is None else stage.order,
            "numbers": layout.stage_numbers(index),
            "published": last,
        }
        for name, value in expected.items():
            assert (contents(layout, layout.stage_field(index, name), epoch) == value).all(), name
    for index, edge in enumerate(layout.workload.edges):
        d, numbers = edge.dependencies, layout.edge_numbers(index)
        for name in ("offsets", "counters", "member_offsets", "members", "group_of"):
            assert np.array_equal(contents(layout, layout.edge_field(index, name), epoch), getattr(d, name)), name
        need = sum(e.dependencies.need for e in sharers(layout, edge))
        for name in ("need", "consumer_need"):
            assert np.array_equal(contents(layout, layout.edge_field(index, name)), need)
        assert contents(layout, layout.edge_field(index, "tail"), epoch) == wrap32((epoch - 1) * numbers.entries)
        ring = contents(layout, layout.edge_field(index, "ring"), epoch)
        assert (ring >> 32 == last).all() and (ring & 0xFFFFFFFF == 0).all()
        counters = contents(layout, layout.edge_field(index, "scoreboard"), epoch)[:: layout.stride]
        surplus = [int(wrap32(int(c) - epoch * int(n))) for c, n in zip(counters, need, strict=True)]
        assert surplus == (-need).tolist(), "every group lacks all its prerequisites of this run"


@given(layouts())
def test_a_ring_is_a_power_of_two_and_holds_a_run(layout: ProtocolLayout) -> None:
    for index, edge in enumerate(layout.workload.edges):
        numbers, d = layout.edge_numbers(index), edge.dependencies
        capacity = numbers.ring_mask + 1
        assert capacity & numbers.ring_mask == 0 and numbers.entries <= capacity < 2 * numbers.entries
        assert layout.edge_field(index, "ring").count == capacity
        assert numbers.entries * numbers.group_size == d.num_consumers, "every ticket has an entry"
        assert numbers.entries == (d.num_groups if numbers.group_entries else d.num_consumers)
        assert numbers.largest_group == max(len(d.members_of(g)) for g in range(d.num_groups))


@given(layouts())
def test_the_same_request_gives_the_same_memory(layout: ProtocolLayout) -> None:
    again = ProtocolLayout(layout.workload, layout.placement, layout.signalling)
    for device in layout.devices:
        assert again.size(device) == layout.size(device)
        for epoch in EPOCHS:
            assert layout.image(device, epoch).nbytes == layout.size(device)
            assert np.array_equal(again.image(device, epoch), layout.image(device, epoch))


def test_sizes_are_known() -> None:
    """Two stages of 2 x 2 and 2 x 3 tiles: 8 fields a stage, 6 + 4 arrays and a scoreboard an edge, one line each."""
    layout = ProtocolLayout(dense_chain(256, [64, 512, 768]), pipelined([0, 1]), "queue")
    assert (layout.size(0), layout.size(1)) == ((8 + 6 + 1) * 128, (8 + 4) * 128)
    layout = ProtocolLayout(dense_chain(256, [64, 512, 768]), pipelined([0, 1]), "counter")
    assert (layout.size(0), layout.size(1)) == ((8 + 6) * 128, (8 + 4 + 1) * 128)


@pytest.mark.parametrize(
    ("value", "wrapped"),
    [
        (0, 0),
        (-1, -1),
        (2**31 - 1, 2**31 - 1),
        (2**31, -(2**31)),
        (2**32 - 1, -1),
        (2**32, 0),
        (-(2**31) - 1, 2**31 - 1),
    ],
)
def test_counts_wrap_as_int32(value: int, wrapped: int) -> None:
    assert wrap32(value) == wrapped and wrap32(value).dtype == np.int32


def test_groups_of_unequal_size_are_pushed_tile_by_tile() -> None:
    stages = (Stage("a", TileGrid(1, 2, 1, 1), 1), Stage("b", TileGrid(1, 5, 1, 1), 1))
    workload = Workload(stages, (Edge(0, 1, from_prerequisites(2, [[0], [0], [0], [1], [1]])),))
    numbers = ProtocolLayout(workload, pipelined([0, 1]), "queue").edge_numbers(0)
    assert (numbers.entries, numbers.ring_mask, numbers.group_size, numbers.largest_group) == (5, 7, 1, 3)
    assert not numbers.group_entries


def test_bad_requests_are_refused() -> None:
    workload = dense_chain(256, [64, 512, 768])
    with pytest.raises(InvalidInput, match="unknown signalling 'bell'; choose one of queue, counter"):
        ProtocolLayout(workload, pipelined([0, 1]), "bell")
    with pytest.raises(InvalidInput, match="3 stages are placed, the workload has 2: place every stage"):
        ProtocolLayout(workload, pipelined([0, 1, 2]), "queue")
    with pytest.raises(PlacementError, match="stage 0 is cut over 2 devices; place it whole"):
        ProtocolLayout(workload, sharded([512, 768], [0, 1]), "queue")
