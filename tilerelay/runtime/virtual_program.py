"""What the process of a virtual device does: it runs its stages' kernels under Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilerelay.graph.cut import CutWorkload
from tilerelay.kernels.call import Piece
from tilerelay.kernels.config import KernelConfig
from tilerelay.protocol.layout import ProtocolLayout
from tilerelay.runtime.launch import Launch, grid_of, make_piece
from tilerelay.runtime.oracle import LayerByLayer, whole_rows
from tilerelay.runtime.virtual_memory import PipelineMemory


class DeviceProgram:
    """One virtual device of a pipeline; its process calls the methods that the pipeline asks for.

    Args:
        fd: the pipeline's memory.
        device: index of this device; it runs the stages that are placed on it, in their order.
        timeout_us: deadline of every single wait, microseconds.
        stamps: note the time of every tile's events.
    """

    def __init__(
        self,
        fd: int,
        cut: CutWorkload,
        signalling: str,
        configs: Sequence[KernelConfig],
        replicate: bool,
        device: int,
        timeout_us: int,
        stamps: bool,
    ) -> None:
        self.cut, self.configs, self.timeout_us = cut, configs, timeout_us
        layout = ProtocolLayout(cut.workload, cut.placement, signalling)
        self.memory = PipelineMemory(cut, layout, replicate=replicate, stamps=stamps, fd=fd)
        self.stages = [i for i in range(len(cut.origin)) if cut.placement.device_of(i) == device]

    def run(self) -> None:
        """Run this device's stages once. Returns when they are done, or have been ended by an abort."""
        for i in self.stages:
            self.launch(i)

    def launch(self, i: int) -> None:
        config, workspace = self.configs[i], self.memory.workspace
        grid = grid_of(config.kind, [self.cut.workload.stages[i]], sms=1)
        Launch(config, [self.piece(i)], workspace, grid, self.timeout_us)()

    def piece(self, i: int, *, listen: bool = True, announce: bool = True) -> Piece:
        """What the kernel of a part is handed (see `make_piece`)."""
        memory = self.memory
        place = memory.plan.source(i)
        source = memory.x if place is None else memory.tensors[place]
        copies = memory.plan.copies(i, memory.tensors)
        return make_piece(
            memory.workspace, i, source, memory.weights[i], copies, memory.biases[i], listen=listen, announce=announce
        )

    def oracle(self) -> None:
        """All stages layer by layer, in this process alone, from `memory.x` into `memory.oracle_outputs`."""
        memory, cpu = self.memory, torch.device("cpu")
        parts = [self.cut.parts_of(stage) for stage in range(len(self.cut.whole.stages))]
        weights = [whole_rows([memory.weights[part] for part in of_stage], cpu) for of_stage in parts]
        biases = [whole_rows([memory.biases[part] for part in of_stage], cpu) for of_stage in parts]
        configs = [self.configs[of_stage[0]] for of_stage in parts]
        oracle = LayerByLayer(self.cut.whole, weights, biases, configs, cpu, sms=1)
        oracle.outputs = memory.oracle_outputs
        oracle.run(memory.x)
