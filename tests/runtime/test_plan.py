"""What a pipeline on GPUs decides before it allocates anything; no GPU is needed to see that."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tilerelay.errors import InvalidInput
from tilerelay.graph.catalog import dense_chain
from tilerelay.graph.dependency import gemm_dependencies
from tilerelay.graph.placement import Placement, pipelined, sharded
from tilerelay.graph.tiling import TileGrid, grouped_order
from tilerelay.graph.turns import UNDER_WAY
from tilerelay.graph.walk import even_walk
from tilerelay.graph.workload import Stage, Workload, chain
from tilerelay.kernels.config import HOPPER_SHARED_BYTES, MOST_SEGMENTS, configure
from tilerelay.runtime import plan as planning
from tilerelay.runtime.cuda_pipeline import CudaPipeline
from tilerelay.runtime.launch import grid_of
from tilerelay.runtime.plan import Plan

THIN = 14336  # columns: with 512 rows 1.7 waves of 128 x 256 tiles on 132 SMs


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs of 132 SMs; tensors are taken as they are."""
    monkeypatch.setattr(planning, "check_machine", lambda devices: dict.fromkeys(devices, 132))
    monkeypatch.setattr(planning, "shared_memory_limit", lambda device: HOPPER_SHARED_BYTES)
    monkeypatch.setattr(planning, "check_tensor", lambda *_: None)


def plan(workload: Workload, placement: Placement, **options: Any) -> Plan:
    weights = [[torch.empty(0)] * len(parts) for parts in placement.stages]
    defaults = {
        "signalling": None, "kernel": None, "backend": "cuda", "timeout_s": 1.0, "hold_back": False,
        "replicate": False, "first_epoch": 1,
    }  # fmt: skip
    return Plan(workload, weights, None, placement, **{**defaults, **options})


def walks(made: Plan) -> list[bool]:
    return [stage.walk is not None for stage in made.cut.workload.stages]


def cut(widths: list[int], gpus: int, **options: Any) -> Plan:
    return plan(dense_chain(512, widths), sharded(widths[1:], range(gpus)), **options)


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_parts_with_a_thin_last_wave_get_walks_of_one_grid(gpus: int) -> None:
    made = cut([4096, THIN * gpus, 4096 * gpus], gpus)
    assert walks(made) == [True] * gpus + [False] * gpus
    assert made.shares_sums == [True, False]
    stages = made.cut.workload.stages
    for device in range(gpus):
        mine = [stages[device], stages[gpus + device]]
        assert grid_of("persistent", mine, 132) == 132
        assert grid_of("persistent", mine[1:], 132) == 64


def test_a_single_wave_is_sent_in_turn_and_its_kernel_has_room_for_a_whole_tile() -> None:
    made = cut([4096, 8192, 4096], 2)
    assert [stage.under_way for stage in made.cut.workload.stages] == [UNDER_WAY, UNDER_WAY, None, None]
    assert made.sends_in_turn == [True, False]
    assert [(c.num_buffers, c.store_buffers) for c in made.configs] == [(3, 2)] * 4, "one kernel for both of a device"
    chained = plan(dense_chain(512, [4096, 8192, 4096]), pipelined([0, 1]))
    assert [stage.under_way for stage in chained.cut.workload.stages] == [UNDER_WAY, None]
    assert [(c.num_buffers, c.store_buffers) for c in chained.configs] == [(3, 2), (4, 1)]
    for other in (
        cut([4096, 8192 * 8, 8192], 2),
        cut([4096, 8192, 4096], 2, kernel="classical"),
        plan(dense_chain(512, [4096, 8192, 4096]), pipelined([0, 1]), signalling="queue"),
    ):
        assert not any(stage.under_way for stage in other.cut.workload.stages)
        assert {c.store_buffers for c in other.configs} == {1}


def test_who_gets_no_walk() -> None:
    """Stages that are read while they are made, classical ones, a queue's readers, and orders that were asked for."""
    widths = [4096, THIN, THIN]
    assert walks(plan(dense_chain(512, widths), pipelined([0, 1]))) == [False, False]
    assert walks(cut(widths, 1, kernel="classical")) == [False, False]
    assert walks(cut(widths, 1, signalling="queue")) == [True, False]
    grid = TileGrid(512, THIN, 128, 256)
    own = np.arange(grid.tiles)[::-1]
    made = plan(chain([Stage("own", grid, 4096, order=own)]), sharded([THIN], [0]))
    assert walks(made) == [False] and np.array_equal(made.cut.workload.stages[0].order, own)


def test_counters_unless_a_consumer_has_to_follow_its_producers_order() -> None:
    whole = dense_chain(512, [512, 1024, 1024])
    order = np.arange(whole.stages[0].grid.tiles)[::-1]
    ordered = replace(whole, stages=(replace(whole.stages[0], order=order), whole.stages[1]))
    assert plan(whole, pipelined([0, 1])).signalling == "counter"
    assert plan(whole, sharded([1024, 1024], [0, 1])).signalling == "counter"
    assert plan(ordered, pipelined([0, 1])).signalling == "queue"
    assert plan(whole, pipelined([0, 1]), hold_back=True).signalling == "queue"
    assert plan(ordered, pipelined([0, 1]), signalling="counter").signalling == "counter"
    last_too = replace(whole, stages=tuple(replace(stage, order=order) for stage in whole.stages))
    assert plan(last_too, pipelined([0, 1])).signalling == "counter", "with a queue, its own order would not be used"


@pytest.mark.parametrize("what", ["turns", "steps"])
def test_turns_and_steps_of_the_callers_are_refused(what: str) -> None:
    chain = dense_chain(512, [512, 512, 512])
    first, second = chain.stages
    stepped = gemm_dependencies(first.grid, second.grid, steps=(256, 512))
    given = {
        "turns": replace(chain, stages=(replace(first, under_way=4), second)),
        "steps": replace(chain, edges=(replace(chain.edges[0], dependencies=stepped),)),
    }
    with pytest.raises(InvalidInput, match="leave under_way=None and steps="):
        plan(given[what], pipelined([0, 1]))


def test_a_walk_of_the_callers_is_refused() -> None:
    """It would be for another grid, or for other parts."""
    stage = dense_chain(512, [4096, THIN]).stages[0]
    walk = even_walk(grouped_order(stage.grid, 4), 4096, 132, together=4, unit=64)
    assert walk is not None
    with pytest.raises(InvalidInput, match="leave walk=None"):
        plan(Workload((replace(stage, walk=walk),), ()), pipelined([0]))


def test_walks_for_two_grids_do_not_meet_in_a_kernel() -> None:
    stage = dense_chain(512, [4096, THIN]).stages[0]
    made = [even_walk(grouped_order(stage.grid, 4), 4096, ctas, together=4, unit=64) for ctas in (132, 128)]
    with pytest.raises(ValueError, match=r"walks for \[128, 132\] CTAs in one kernel"):
        grid_of("persistent", [replace(stage, walk=walk) for walk in made], 132)


def test_a_kernel_has_only_so_many_segments() -> None:
    """More would not fit shared memory; the others are launches of their own."""
    kind = configure("persistent", (128, 256))
    pipeline: Any = SimpleNamespace(_configs=[kind] * 10)
    assert CudaPipeline._kernels_of(pipeline, tuple(range(10))) == [
        tuple(range(MOST_SEGMENTS)), tuple(range(MOST_SEGMENTS, 10)),
    ]  # fmt: skip
    pipeline._configs[1] = configure("persistent", (128, 128))
    assert CudaPipeline._kernels_of(pipeline, (0, 1, 2, 3)) == [(0,), (1,), (2, 3)]
