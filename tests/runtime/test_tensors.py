"""Which copies of which outputs a placed chain keeps, and where each part reads and stores."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.graph.test_cut import placements
from tilerelay.graph.catalog import dense_chain
from tilerelay.graph.cut import cut
from tilerelay.graph.placement import Part, Placement, pipelined, sharded
from tilerelay.runtime.tensors import OutputPlan

CHAIN = dense_chain(40, [16, 48, 32, 24], tile=(16, 16))


def filled(plan: OutputPlan) -> dict[tuple[int, int], torch.Tensor]:
    return {place: torch.zeros(shape, dtype=torch.int32) for place, shape in plan.shapes.items()}


def test_a_pipelined_chain_keeps_each_output_where_it_is_read() -> None:
    plan = OutputPlan(cut(CHAIN, pipelined([2, 0, 1])), replicate=False)
    assert plan.shapes == {(0, 0): (40, 48), (1, 1): (40, 32), (2, 1): (40, 24)}
    assert [plan.source(part) for part in range(3)] == [None, (0, 0), (1, 1)]
    assert plan.results() == [(2, 1)]
    tensors = filled(plan)
    for part, place in enumerate([(0, 0), (1, 1), (2, 1)]):
        (copy,) = plan.copies(part, tensors)
        assert copy.data_ptr() == tensors[place].data_ptr() and copy.shape == tensors[place].shape


@pytest.mark.parametrize("replicate", [False, True])
def test_a_sharded_chain_keeps_copies_on_all_devices(replicate: bool) -> None:
    plan = OutputPlan(cut(CHAIN, sharded([48, 32, 24], [0, 1])), replicate=replicate)
    last = (40, 24) if replicate else (40, 8)
    widths = {(0, 0): (40, 48), (0, 1): (40, 48), (1, 0): (40, 32), (1, 1): (40, 32)}
    assert plan.shapes == widths | {(2, 0): last, (2, 1): last if replicate else (40, 16)}
    assert [plan.source(part) for part in range(6)] == [None, None, (0, 0), (0, 1), (1, 0), (1, 1)]
    assert plan.results() == [(2, 0), (2, 1)]
    copies = plan.copies(5, filled(plan))
    assert [tuple(copy.shape) for copy in copies] == [(40, 16)] * (2 if replicate else 1)


def test_peers_are_written_first() -> None:
    plan = OutputPlan(cut(CHAIN, sharded([48, 32, 24], [0, 1, 2])), replicate=True)
    tensors = filled(plan)
    for part in (0, 1, 2):
        owners = [d for copy in plan.copies(part, tensors) for d in range(3) if _inside(copy, tensors[0, d])]
        assert owners[-1] == part and sorted(owners) == [0, 1, 2]


def test_a_stage_that_another_device_reads_is_not_kept_at_home() -> None:
    left_right = (Part(0, None, (0, 24)), Part(1, None, (24, 48)))
    plan = OutputPlan(cut(CHAIN, Placement((left_right, (Part(2),), (Part(3),)))), replicate=False)
    assert plan.shapes == {(0, 2): (40, 48), (1, 3): (40, 32), (2, 3): (40, 24)}


@settings(max_examples=60, deadline=None)
@given(st.data(), st.booleans())
def test_every_copy_is_written_once_everywhere_and_read_whole(data: st.DataObject, replicate: bool) -> None:
    placed = cut(CHAIN, data.draw(placements(CHAIN)))
    plan = OutputPlan(placed, replicate)
    tensors = filled(plan)
    for part in range(len(placed.origin)):
        for copy in plan.copies(part, tensors):
            assert tuple(copy.shape) == (40, placed.workload.stages[part].grid.n)
            copy += 1 + placed.columns[part][0]
    for (stage, device), tensor in tensors.items():
        first = 0
        if stage == 2 and not replicate:
            first = next(placed.columns[p][0] for p in placed.parts_of(2) if placed.placement.device_of(p) == device)
        for part in placed.parts_of(stage):
            left, right = placed.columns[part]
            here = tensor[:, left - first : right - first] if left >= first else tensor[:, :0]
            assert bool((here == 1 + left).all()), "each element by its own part, once"
        assert bool((tensor > 0).all())
    for part, (stage, _) in enumerate(placed.origin):
        source, device = plan.source(part), placed.placement.device_of(part)
        assert source == ((stage - 1, device) if stage else None)
        assert source is None or plan.shapes[source] == (40, CHAIN.stages[stage].k)


def _inside(view: torch.Tensor, tensor: torch.Tensor) -> bool:
    return view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
