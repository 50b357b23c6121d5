"""Pipelined pairs with tensor parallelism: who computes what, with pipelines that are stand-ins."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from tilerelay.baselines.cell import Cell
from tilerelay.baselines.hybrid_tp import Group, HybridLaunch, HybridTensorParallel, groups_of
from tilerelay.bench.own import Pipelined


def test_groups_are_pairs_of_neighbours() -> None:
    assert groups_of(4, 132) == [Group(0, 1), Group(2, 3)]
    assert len(groups_of(8, 132)) == 4


def test_on_two_gpus_two_groups_share_the_sms_in_opposite_directions() -> None:
    groups = groups_of(2, 132)
    assert groups == [Group(0, 1, 66), Group(1, 0, 66)]
    assert [str(g.placement) for g in groups] == ["0:66,1:66", "1:66,0:66"]
    assert len({g.last for g in groups}) == 2  # one rank of the all-reduce on each GPU


def test_refusals() -> None:
    method = HybridTensorParallel()
    assert method.refusal(Cell(4, 2, 4096, 8192, 8192)) is None
    assert method.refusal(Cell(2, 2, 4096, 8192, 8192)) is None
    assert "even" in str(method.refusal(Cell(3, 2, 4096, 8192, 8192)))
    assert "pair" in str(method.refusal(Cell(4, 4, 4096, 8192, 8192)))
    assert Pipelined().refusal(Cell(2, 2, 4096, 8192, 8192)) is None
    assert Pipelined().refusal(Cell(4, 2, 4096, 8192, 8192)) is not None
    assert Pipelined().refusal(Cell(2, 4, 4096, 8192, 8192)) is not None


class FakePipeline:
    made: ClassVar[list[FakePipeline]] = []

    def __init__(self, workload: Any, **options: Any) -> None:
        self.workload, self.options, self.closed = workload, options, False
        FakePipeline.made.append(self)

    def capture(self, x: Any, *, all_streams: bool) -> Any:
        if len(FakePipeline.made) == 2:
            raise RuntimeError("no second capture")
        return self

    def replay(self) -> None: ...

    def close(self) -> None:
        self.closed = True


def test_shards_go_to_the_groups_and_a_failure_closes_all(cpu_operands: Any) -> None:
    FakePipeline.made = []
    cell = Cell(4, 2, 24, 32, 16)
    operands = cpu_operands(4, cell.widths, cell.m)
    method = HybridTensorParallel(FakePipeline)
    with pytest.raises(RuntimeError, match="no second capture"):
        method._launch(cell, operands, None, groups_of(4, 132), True, "graph")  # type: ignore[arg-type]
    one, two = FakePipeline.made
    assert one.closed and two.closed
    assert [s.grid.n for s in one.workload.stages] == [16, 16] and [s.k for s in one.workload.stages] == [16, 16]
    assert one.options["weights"][0].equal(operands.weight(0, 0)[:16])
    assert two.options["weights"][0].equal(operands.weight(0, 0)[16:])
    assert two.options["weights"][1].equal(operands.weight(1, 0)[:, 16:]) and two.options["weights"][1].is_contiguous()


def test_a_closed_launch_holds_nothing() -> None:
    launch = HybridLaunch(None, groups_of(4, 132), True)  # type: ignore[arg-type]
    FakePipeline.made = []
    pipeline = FakePipeline(None)
    launch.add(pipeline, None, "eager")  # type: ignore[arg-type]
    launch.close()
    launch.close()
    assert pipeline.closed and launch.pieces() == []
