"""What the process of a virtual device does: it runs its stages' kernels under Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilerelay.graph.placement import Placement
from tilerelay.graph.workload import Workload
from tilerelay.kernels.config import KernelConfig
from tilerelay.protocol.layout import ProtocolLayout
from tilerelay.runtime.launch import StageLaunch, stage_arguments
from tilerelay.runtime.oracle import LayerByLayer
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
        workload: Workload,
        placement: Placement,
        signalling: str,
        configs: Sequence[KernelConfig],
        device: int,
        timeout_us: int,
        stamps: bool,
    ) -> None:
        self.workload, self.configs = workload, configs
        self.memory = PipelineMemory(workload, ProtocolLayout(workload, placement, signalling), stamps=stamps, fd=fd)
        self.stages = [i for i in range(len(workload.stages)) if placement.device_of(i) == device]
        self.arguments = {i: stage_arguments(self.memory.workspace, i, timeout_us=timeout_us) for i in self.stages}
        self._oracle: LayerByLayer | None = None

    def run(self) -> None:
        """Run this device's stages once. Returns when they are done, or have been ended by an abort."""
        for i in self.stages:
            self.launch(i)

    def launch(self, i: int) -> None:
        memory = self.memory
        source = memory.outputs[i - 1] if i else memory.x
        StageLaunch(
            self.configs[i], self.workload.stages[i], source, memory.weights[i], memory.outputs[i],
            memory.biases[i], self.arguments[i], sms=1,
        )()  # fmt: skip

    def oracle(self) -> None:
        """All stages layer by layer, in this process alone, from `memory.x` into `memory.oracle_outputs`."""
        memory = self.memory
        if self._oracle is None:
            cpu = torch.device("cpu")
            self._oracle = LayerByLayer(self.workload, memory.weights, memory.biases, self.configs, cpu, sms=1)
            self._oracle.outputs = memory.oracle_outputs
        self._oracle.run(memory.x)
