"""Kernels that are no GEMM, for workers that interpret: tiles of one number each, plain sums, conversions."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tilerelay.graph.placement import Placement
from tilerelay.graph.workload import Workload
from tilerelay.kernels.conversion import narrow, widen
from tilerelay.kernels.protocol import epilogue, leave, load_numbers, prologue
from tilerelay.kernels.sync import clock_ns, load_uniform
from tilerelay.protocol.layout import RECORD_WORDS, ProtocolLayout
from tilerelay.runtime.launch import make_piece
from tilerelay.runtime.virtual_memory import SharedTensors
from tilerelay.runtime.workspace import Workspace


@triton.jit
def relay(
    source, target, offsets, ids, segment, words, timeout_us,
    HOOKS: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """target[t] = a number that shows t, the stage and each prerequisite's number; hooks as in a GEMM."""
    numbers = load_numbers(segment.control)
    epoch = tl.load(segment.control.epoch)
    alive = load_uniform(segment.control.abort) == 0
    ticket = tl.program_id(0)
    tile, alive = prologue(ticket, alive, epoch, segment, numbers, words, timeout_us, HOOKS.source, STRIDE)
    total = tl.load(source) * 0 + tile + 7 * numbers.stage
    for at in range(tl.load(offsets + tile), tl.load(offsets + tile + 1)):
        needed = tl.load(ids + at)
        total += tl.load(source + needed) * (2 * needed + 3)
    tl.store(target + tile, total)
    READERS: tl.constexpr = HOOKS.readers
    epilogue(tile, epoch, alive, tl.arange(0, 32), segment, numbers, 0, READERS, HOOKS, STRIDE)
    leave(segment.control, epoch)


class RelayMemory:
    """`values[i]`, int64 [tiles]: the inputs (i = 0) and what stage i - 1 made of them."""

    def __init__(self, workload: Workload, layout: ProtocolLayout, inputs: int, fd: int | None = None) -> None:
        shapes: dict[Any, Any] = {0: ((inputs,), torch.int64)}
        for i, stage in enumerate(workload.stages):
            shapes[i + 1] = ((stage.grid.tiles,), torch.int64)
            shapes["protocol", i] = ((layout.size(i),), torch.uint8)
        shapes["records"] = ((len(workload.stages), RECORD_WORDS), torch.int32)
        self.shared = SharedTensors(shapes, fd)
        self.values = [self.shared[i] for i in range(len(workload.stages) + 1)]
        buffers = {i: self.shared["protocol", i] for i in layout.devices}
        self.workspace = Workspace(layout, buffers, self.shared["records"], lambda words, _: words)


class RelayProgram:
    """One stage per device over any dependency maps. Args: needs: prerequisites of every tile of every stage."""

    def __init__(
        self,
        fd: int,
        workload: Workload,
        placement: Placement,
        signalling: str,
        needs: list[list[list[int]]],
        stage: int,
    ) -> None:
        layout = ProtocolLayout(workload, placement, signalling)
        self.memory = RelayMemory(workload, layout, 1 + max(map(max, needs[0])), fd)
        self.stage, self.tiles = stage, workload.stages[stage].grid.tiles
        # Tensors that this kernel does not take stand for those of a GEMM.
        nothing = torch.empty(0)
        self.piece = make_piece(self.memory.workspace, stage, nothing, nothing, [nothing], None)
        self.words, self.stride = 2 * len(workload.stages), layout.stride
        sizes = torch.tensor([0] + [len(tiles) for tiles in needs[stage]])
        self.offsets = sizes.cumsum(0).to(torch.int32)
        self.ids = torch.tensor([p for tiles in needs[stage] for p in tiles], dtype=torch.int32)

    def run(self) -> None:
        source, target = self.memory.values[self.stage : self.stage + 2]
        relay[(self.tiles,)](
            source, target, self.offsets, self.ids, self.piece.segment, self.words, 20 * 10**6,
            HOOKS=self.piece.hooks, STRIDE=self.stride,
        )  # fmt: skip


@triton.jit
def _add(word, times):
    for _ in range(times):
        tl.atomic_add(word, 1, sem="relaxed", scope="sys")


@triton.jit
def _linger(word, witness, wanted):
    """Stay until another process has written `wanted`, then leave without writing anything there."""
    tl.store(witness, 1)
    end = clock_ns() + 20_000_000_000
    while (load_uniform(word) != wanted) & (clock_ns() < end):
        pass


@triton.jit
def _widen(source, target, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(target + at, widen(tl.load(source + at)))


@triton.jit
def _narrow(source, target, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(target + at, narrow(tl.load(source + at), target.dtype.element_ty))


class Scratch:
    """Small kernels on two words of shared memory and on tensors that come with the message."""

    def __init__(self, fd: int) -> None:
        self.words = SharedTensors({"words": ((2,), torch.int32)}, fd)["words"]

    def add(self, times: int, launches: int) -> None:
        for _ in range(launches):
            _add[(1,)](self.words[:1], times)

    def linger(self, wanted: int) -> None:
        _linger[(1,)](self.words[:1], self.words[1:], wanted)

    def widen(self, bits: list[int], dtype: torch.dtype) -> list[int]:
        source = torch.tensor(bits, dtype=torch.int32).to(torch.int16).view(dtype)
        target = torch.empty(len(bits), dtype=torch.float32)
        _widen[(1,)](source, target, len(bits))
        return target.view(torch.int32).tolist()

    def narrow(self, bits: list[int], dtype: torch.dtype) -> list[int]:
        source = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
        target = torch.empty(len(bits), dtype=dtype)
        _narrow[(1,)](source, target, len(bits))
        return target.view(torch.int16).tolist()
