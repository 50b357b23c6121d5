"""Memory of a pipeline on virtual devices: one anonymous mapping, seen as the same tensors by every process.

The mapping has no name in any file system: when the last process that holds it ends, in whatever way, it is gone.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Mapping
from typing import Any

import torch

from tilerelay.graph.cut import CutWorkload
from tilerelay.kernels.protocol import EVENTS
from tilerelay.protocol.layout import ALIGNMENT, RECORD_WORDS, ProtocolLayout
from tilerelay.runtime.oracle import TORCH_DTYPES
from tilerelay.runtime.tensors import OutputPlan
from tilerelay.runtime.workspace import Workspace

Shapes = Mapping[Any, tuple[tuple[int, ...], torch.dtype]]


class SharedTensors:
    """Zeroed tensors in anonymous shared memory, by key.

    Args:
        shapes: shape and dtype of every tensor; all processes must give the same, in the same order.
        fd: memory made by another process's object, which the caller may close afterwards; None: make it.
    """

    _fd = -1

    def __init__(self, shapes: Shapes, fd: int | None = None) -> None:
        offsets, end = [], 0
        for shape, dtype in shapes.values():
            offsets.append(end)
            end += -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        size = max(end, 1)
        if fd is None:
            fd = self._fd = os.memfd_create("tilerelay")
            os.ftruncate(fd, size)
        # The mapping lives as long as a tensor in it does.
        mapping = torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)
        self.tensors: dict[Any, torch.Tensor] = {
            key: mapping[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for start, (key, (shape, dtype)) in zip(offsets, shapes.items(), strict=True)
        }

    @property
    def fd(self) -> int:
        """The maker's file descriptor, to be handed to other processes."""
        return self._fd

    def __getitem__(self, key: Any) -> torch.Tensor:
        return self.tensors[key]

    def close(self) -> None:
        """Drop the tensors; those that others still hold stay valid. Closing twice is allowed."""
        self.tensors = {}
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()


class PipelineMemory:
    """All tensors of a pipeline: `x` [M, K], `weights` [N, K] and `biases` [N] or None of every part, `tensors` (see
    `OutputPlan`), `oracle_outputs` [M, N] of every stage of the whole workload, and the protocol's `workspace`.

    A workspace's table of abort words holds addresses of this process; that is why every process makes its own.

    Args:
        cut: the workload in parts.
        stamps: keep timestamps of every tile.
        fd: as for `SharedTensors`.
    """

    def __init__(
        self,
        cut: CutWorkload,
        layout: ProtocolLayout,
        *,
        replicate: bool,
        stamps: bool,
        fd: int | None = None,
    ) -> None:
        workload, parts = cut.workload, range(len(cut.workload.stages))
        dtype = TORCH_DTYPES[workload.dtype]
        first = workload.stages[0]
        self.plan = OutputPlan(cut, replicate)
        shapes: dict[Any, tuple[tuple[int, ...], torch.dtype]] = {"x": ((first.grid.m, first.k), dtype)}
        for i, stage in enumerate(workload.stages):
            shapes["weight", i] = ((stage.grid.n, stage.k), dtype)
            shapes["bias", i] = ((stage.grid.n if stage.bias else 0,), dtype)
            shapes["stamps", i] = ((stage.grid.tiles, EVENTS.value), torch.int64)
        for i, stage in enumerate(cut.whole.stages):
            shapes["oracle", i] = ((stage.grid.m, stage.grid.n), dtype)
        for place, shape in self.plan.shapes.items():
            shapes["output", place] = (shape, dtype)
        for device in layout.devices:
            shapes["protocol", device] = ((layout.size(device),), torch.uint8)
        shapes["records"] = ((len(workload.stages), RECORD_WORDS), torch.int32)
        self.shared = SharedTensors(shapes, fd)
        self.x = self.shared["x"]
        self.weights = [self.shared["weight", i] for i in parts]
        self.biases = [self.shared["bias", i] if workload.stages[i].bias else None for i in parts]
        self.tensors = {place: self.shared["output", place] for place in self.plan.shapes}
        self.oracle_outputs = [self.shared["oracle", i] for i in range(len(cut.whole.stages))]
        buffers = {device: self.shared["protocol", device] for device in layout.devices}
        self.workspace = Workspace(layout, buffers, self.shared["records"], lambda words, _: words)
        if stamps:
            self.workspace.stamps = {i: self.shared["stamps", i] for i in parts}
