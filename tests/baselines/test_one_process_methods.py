"""Every one-process baseline against the reference, in random orders among those that its waits allow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tilerelay.baselines import method as method_module
from tilerelay.baselines.cell import Cell
from tilerelay.baselines.floor import Floor
from tilerelay.baselines.micro_batch import MicroBatchCopy, MicroBatchDirect
from tilerelay.baselines.reference import Reference, covers
from tilerelay.baselines.sequential import Sequential, SequentialCopy, gpu_of_layer
from tilerelay.baselines.tensor_parallel import TensorParallel, TensorParallelChunked
from tilerelay.baselines.weight_streaming import WeightStreaming

METHODS = [
    Sequential,
    SequentialCopy,
    MicroBatchDirect,
    MicroBatchCopy,
    TensorParallel,
    TensorParallelChunked,
    WeightStreaming,
]
OVERLAPPING = [SequentialCopy, MicroBatchDirect, MicroBatchCopy, TensorParallelChunked, WeightStreaming]
CELLS = [
    Cell(2, 2, 24, 16, 16),
    Cell(2, 2, 24, 32, 16),  # an MLP: 16 -> 32 -> 16
    Cell(4, 4, 24, 16, 16),
    Cell(2, 4, 24, 16, 16),  # two layers on each GPU
    Cell(4, 2, 24, 16, 16),  # fewer layers than GPUs
    Cell(1, 1, 24, 16, 16),
]
FP32 = 1e-4


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 8 and of 10 rows (the last one ragged)."""
    monkeypatch.setattr(method_module, "CHUNKS", (8, 10))


def poisoned(operands: Any, variant: Any) -> None:
    for tensor in variant.poison:
        tensor.fill_(float("nan"))


PAIRS = [
    pytest.param(make, cell, id=f"{make.name}: {cell}")
    for make in METHODS
    for cell in CELLS
    # asked with rows enough for the real chunk sizes
    if make().refusal(replace(cell, m=24 * 256)) is None
]


@pytest.mark.parametrize(("make", "cell"), PAIRS)
def test_every_variant_is_right_in_every_order(make: Any, cell: Cell, deferred_lanes: Any, cpu_operands: Any) -> None:
    method = make()
    operands = cpu_operands(cell.gpus, cell.widths, cell.m + 8)  # the batch is not the largest one
    reference = Reference(operands, 0)
    for seed in range(6):
        lanes = deferred_lanes(cell.gpus, seed)
        variants = method.variants(cell, operands, lanes)
        assert any(not v.compute_only for v in variants)
        for variant in variants:
            poisoned(operands, variant)
            lanes.run(variant.enqueue)
            if variant.checked:
                assert covers(variant.pieces(), cell.m, cell.widths[-1])
                assert reference.worst_row_error(variant.pieces()) < FP32, variant.label


@pytest.mark.parametrize("make", OVERLAPPING, ids=lambda m: m.name)
def test_a_forgotten_wait_would_be_noticed(make: Any, deferred_lanes: Any, cpu_operands: Any) -> None:
    """The test above can fail: without waits, some order gives a wrong result."""
    cell = Cell(2, 4, 24, 16, 16) if make is TensorParallelChunked else Cell(2, 2, 24, 16, 16)
    operands = cpu_operands(2, cell.widths, cell.m)
    reference = Reference(operands, 0)
    errors = []
    for seed in range(20):
        lanes = deferred_lanes(2, seed, ignore_waits=True)
        for variant in make().variants(cell, operands, lanes):
            poisoned(operands, variant)
            lanes.run(variant.enqueue)
            errors.append(reference.worst_row_error(variant.pieces()))
    assert any(not error < FP32 for error in errors)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_every_cut_of_the_floor_does_all_flops(cell: Cell, cpu_operands: Any) -> None:
    class CountingLanes:
        gpus, flops = cell.gpus, 0

        def mm(self, gpu: int, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
            assert out.shape == (x.shape[0], w.shape[0]) and x.shape[1] == w.shape[1]
            self.flops += 2 * x.shape[0] * w.shape[0] * w.shape[1]

    for variant in Floor().variants(cell, cpu_operands(cell.gpus, cell.widths, cell.m), CountingLanes()):  # type: ignore[arg-type]
        counter = CountingLanes()
        again = {v.label: v for v in Floor().variants(cell, cpu_operands(cell.gpus, cell.widths, cell.m), counter)}  # type: ignore[arg-type]
        again[variant.label].enqueue()
        assert counter.flops == cell.flops, variant.label


def test_the_floor_names_its_cuts() -> None:
    from tilerelay.baselines.floor import cuts

    assert list(cuts(Cell(2, 2, 24, 16, 16))) == ["layer per GPU", "cut by columns", "cut by rows"]
    assert list(cuts(Cell(4, 2, 24, 16, 16))) == ["cut by columns", "cut by rows"]
    assert Floor().refusal(Cell(5, 2, 24, 16, 16)) is not None


def test_refusals_say_why() -> None:
    assert "two GPUs" in str(TensorParallel().refusal(Cell(1, 1, 8, 16, 16)))
    assert "odd" in str(TensorParallel().refusal(Cell(3, 3, 9, 18, 18)))
    assert "do not fill" in str(MicroBatchDirect().refusal(Cell(4, 2, 24, 16, 16)))
    assert "chunks" in str(MicroBatchCopy().refusal(Cell(2, 2, 8, 16, 16)))
    assert "rows" in str(WeightStreaming().refusal(Cell(2, 2, 7, 16, 16)))


def test_layers_go_to_gpus_in_order() -> None:
    assert gpu_of_layer(Cell(2, 4, 8, 16, 16)) == [0, 0, 1, 1]
    assert gpu_of_layer(Cell(4, 4, 8, 16, 16)) == [0, 1, 2, 3]


def test_tensor_parallel_has_one_all_reduce_for_two_layers_and_a_part_without(
    deferred_lanes: Any, cpu_operands: Any
) -> None:
    cell = Cell(4, 4, 24, 16, 16)
    lanes = deferred_lanes(4, 0)
    calls: list[str] = []
    lanes.all_reduce = lambda tensors, lane: calls.append(lane)
    whole, part = TensorParallel().variants(cell, cpu_operands(4, cell.widths, cell.m), lanes)
    lanes.run(whole.enqueue)
    assert calls == ["main", "main"]
    lanes.run(part.enqueue)
    assert calls == ["main", "main"] and part.compute_only
