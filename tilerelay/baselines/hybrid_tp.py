"""Pipelined pairs combined with tensor parallelism (paper, Figure 6b): groups of two GPUs, weights cut over the groups.

Group g holds columns of A and rows of B, computes its partial Y as a two-stage pipeline on its own pair of GPUs, and an
all-reduce sums over the groups: half as many ranks as pure tensor parallelism has. On two GPUs there is room for one
pair; to have two groups all the same, both share both GPUs, each stage on half of the SMs and the groups in opposite
directions. That is for correctness, not for speed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tilerelay.baselines.cell import Cell
from tilerelay.baselines.cuda_lanes import CudaLanes
from tilerelay.baselines.lanes import Lanes
from tilerelay.baselines.method import Lives, Piece, Variant, refuse_unless
from tilerelay.baselines.operands import Operands
from tilerelay.graph.catalog import dense_chain
from tilerelay.graph.placement import Part, Placement
from tilerelay.runtime.cuda import on
from tilerelay.runtime.pipeline import Pipeline


@dataclass(frozen=True)
class Group:
    """A pair of GPUs: `first` computes the group's columns of A, `last` its rows of B. sms None: whole GPUs."""

    first: int
    last: int
    sms: int | None = None

    @property
    def placement(self) -> Placement:
        return Placement(((Part(self.first, self.sms),), (Part(self.last, self.sms),)))


def groups_of(gpus: int, sms: int) -> list[Group]:
    """Pairs of neighbours; on two GPUs two groups that share both.

    Args:
        sms: SMs per GPU.
    """
    if gpus == 2:
        return [Group(0, 1, sms // 2), Group(1, 0, sms // 2)]
    return [Group(gpu, gpu + 1) for gpu in range(0, gpus, 2)]


class HybridTensorParallel:
    """One CUDA graph per group and NCCL's all-reduce after them; events order them without the host."""

    name = "hybrid-tp"
    lives = Lives(x="first GPU of every group", y="last GPU of every group", replicated="X, Y")

    def __init__(self, make_pipeline: Callable[..., Any] = Pipeline) -> None:
        self._make_pipeline = make_pipeline

    def refusal(self, cell: Cell) -> str | None:
        groups = 2 if cell.gpus == 2 else cell.gpus // 2
        return refuse_unless(
            (cell.gpus % 2 == 0, "needs an even number of GPUs"),
            (cell.layers == 2, f"is a pair of layers; the chain has {cell.layers}"),
            (cell.n % (8 * groups) == 0, f"cuts {cell.n} columns over {groups} groups in multiples of 8"),
        )

    def variants(self, cell: Cell, operands: Operands, lanes: Lanes) -> list[Variant]:
        assert isinstance(lanes, CudaLanes)
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        groups = groups_of(cell.gpus, sms)
        return [
            Variant(
                label=label,
                enqueue=lambda: None,
                pieces=lambda: (),
                compute_only=not reduce,
                checked=reduce,
                launcher=partial(self._launch, cell, operands, lanes, groups, reduce),
                note="two groups share both GPUs, half of the SMs each" if cell.gpus == 2 else None,
            )
            for label, reduce in (("whole batch", True), ("without all-reduce", False))
        ]

    def _launch(
        self, cell: Cell, operands: Operands, lanes: CudaLanes, groups: list[Group], reduce: bool, timing: str
    ) -> HybridLaunch:
        launch = HybridLaunch(lanes, groups, reduce)
        try:
            for g, group in enumerate(groups):
                launch.add(
                    self._make_pipeline(
                        dense_chain(cell.m, [cell.k, cell.n // len(groups), cell.k]),
                        weights=[
                            operands.column_shard(0, group.first, g, len(groups)),
                            operands.row_shard(1, group.last, g, len(groups)),
                        ],
                        placement=group.placement,
                        kernel="persistent",
                    ),
                    operands.x(group.first)[: cell.m],
                    timing,
                )
        except BaseException:
            launch.close()
            raise
        return launch


class HybridLaunch:
    """All groups' pipelines at once, then the all-reduce of their outputs."""

    def __init__(self, lanes: CudaLanes, groups: Sequence[Group], reduce: bool) -> None:
        self._lanes, self._groups, self._reduce = lanes, groups, reduce
        self._pipelines: list[Any] = []
        self._replays: list[Callable[[], object]] = []

    def add(self, pipeline: Any, x: torch.Tensor, timing: str) -> None:
        """The next group's pipeline; it is closed with the launch."""
        self._pipelines.append(pipeline)
        self._replays.append(
            pipeline.capture(x, all_streams=False).replay if timing == "graph" else lambda: pipeline(x)
        )

    def replay(self) -> None:
        self._lanes.run(self._body)

    def _body(self) -> None:
        for group, replay in zip(self._groups, self._replays, strict=True):
            with on(self._lanes.stream(group.first)):
                replay()
        done = [self._lanes.mark(group.first, "main") for group in self._groups]
        if self._reduce:
            for group, mark in zip(self._groups, done, strict=True):
                self._lanes.wait(group.last, "main", mark)
            self._lanes.all_reduce({g.last: p.y for g, p in zip(self._groups, self._pipelines, strict=True)}, "main")

    def finish(self) -> None:
        """Raises PipelineAborted when a wait of one of the groups ran past its deadline."""
        for pipeline in self._pipelines:
            pipeline.synchronize()

    def pieces(self) -> list[Piece]:
        return [Piece(pipeline.y) for pipeline in self._pipelines]

    def poison(self) -> list[torch.Tensor]:
        return [t for pipeline in self._pipelines for t in (*pipeline.intermediates, pipeline.y)]

    def close(self) -> None:
        for pipeline in self._pipelines:
            pipeline.close()
        self._pipelines, self._replays = [], []
