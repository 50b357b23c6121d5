"""Which tensors a placed workload needs: where each part reads its rows and stores its tiles."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tilerelay.graph.cut import CutWorkload

Place = tuple[int, int]  # (original stage, device)


class OutputPlan:
    """The copies of every stage's output.

    A stage's output [M, N] is kept whole on every device that reads it. The last stage's is kept where it is computed:
    each part has its own columns, or, with `replicate`, all devices of the parts have all columns.

    Args:
        cut: the workload in parts.
        replicate: keep the last output whole on every device that computes a part of it.

    Attributes:
        shapes: the tensors to allocate, each on its device.
    """

    def __init__(self, cut: CutWorkload, replicate: bool) -> None:
        self._cut, self._replicate = cut, replicate
        self._stages = max(stage for stage, _ in cut.origin) + 1
        self.shapes: dict[Place, tuple[int, int]] = {}
        for stage in range(self._stages):
            parts = cut.parts_of(stage)
            m = cut.workload.stages[parts[0]].grid.m
            n = cut.columns[parts[-1]][1]
            for device in self._readers(stage):
                self.shapes[stage, device] = (m, n)
            if self._keeps_parts(stage):
                for part in parts:
                    first, end = cut.columns[part]
                    self.shapes[stage, self._device(part)] = (m, end - first)

    def _device(self, part: int) -> int:
        return self._cut.placement.device_of(part)

    def _keeps_parts(self, stage: int) -> bool:
        return stage == self._stages - 1 and not self._replicate

    def _readers(self, stage: int) -> list[int]:
        """Devices that hold the whole output."""
        if self._keeps_parts(stage):
            return []
        reading = stage if stage == self._stages - 1 else stage + 1
        return [self._device(part) for part in self._cut.parts_of(reading)]

    def source(self, part: int) -> Place | None:
        """What a part reads; None: the pipeline's input."""
        stage = self._cut.origin[part][0]
        return (stage - 1, self._device(part)) if stage else None

    def copies(self, part: int, tensors: Mapping[Place, torch.Tensor]) -> list[torch.Tensor]:
        """Where a part stores its tiles, [M, its columns] each: peers first, their writes take longest."""
        stage, device = self._cut.origin[part][0], self._device(part)
        if self._keeps_parts(stage):
            return [tensors[stage, device]]
        first, end = self._cut.columns[part]
        readers = sorted(self._readers(stage), key=lambda reader: reader == device)
        return [tensors[stage, reader][:, first:end] for reader in readers]

    def results(self) -> list[Place]:
        """The last stage's tensors, in the order of its parts."""
        return [(self._stages - 1, self._device(part)) for part in self._cut.parts_of(self._stages - 1)]
