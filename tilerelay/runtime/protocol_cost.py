"""One stage's kernel alone, with the protocol or without, its output in its own memory or a peer's; and timing it.

What a pipeline does at once is taken apart here: the difference between two such runs is the price of one thing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from tilerelay.errors import UnsupportedMachine
from tilerelay.graph.catalog import dense_chain
from tilerelay.graph.placement import Part, Placement, pipelined
from tilerelay.graph.workload import Workload
from tilerelay.kernels.compile import compile_call
from tilerelay.kernels.config import KernelConfig
from tilerelay.kernels.protocol import EVENTS
from tilerelay.protocol.layout import ProtocolLayout
from tilerelay.runtime.launch import TIMEOUT_US, Launch, grid_of, make_piece
from tilerelay.runtime.tracing import StageRun, assemble, tickets
from tilerelay.runtime.workspace import Workspace, new_records
from tilerelay.trace.events import Trace

WARM_UP = 3


class ProducerAlone:
    """The first stage of a two-stage chain, whose consumer never runs: nobody reads what it announces.

    Args:
        out: [M, N], in the memory of the stage's own device or of a peer.
        consumer: device index of `out`; the queue is there, too.
        announce: with the epilogue; False: the same kernel without the protocol.
        stamps: keep time stamps.
        sms: CTAs of a persistent grid.
        torch_device: device index -> torch's device.
    """

    def __init__(
        self,
        workload: Workload,
        config: KernelConfig,
        x: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor,
        *,
        device: int,
        consumer: int,
        announce: bool,
        stamps: bool,
        sms: int,
        torch_device: Callable[[int], torch.device],
    ) -> None:
        # Two stages on one device need shares of it; nothing looks at their sizes here.
        shares = Placement(((Part(device, 1),), (Part(device, 1),)))
        placement = shares if consumer == device else pipelined([device, consumer])
        layout = ProtocolLayout(workload, placement, "queue")
        buffers = {d: torch.empty(layout.size(d), dtype=torch.uint8, device=torch_device(d)) for d in layout.devices}
        records = new_records(len(workload.stages), x.device.type)
        self.workspace = Workspace(layout, buffers, records, lambda words, d: words.to(torch_device(d)))
        stage = workload.stages[0]
        if stamps:
            self.workspace.stamps[0] = torch.zeros(stage.grid.tiles, EVENTS.value, dtype=torch.int64, device=x.device)
        self.workspace.reset()
        piece = make_piece(self.workspace, 0, x, weight, [out], None, announce=announce)
        self._workload, self._kernel, self._device = workload, config.kind, device
        grid = grid_of(config.kind, [stage], sms)
        self._workers = grid if config.kind == "persistent" else None
        self._launch = Launch(config, [piece], self.workspace, grid, TIMEOUT_US)

    def __call__(self) -> None:
        """Enqueue the kernel on the current stream."""
        self._launch()

    def trace(self, source: str) -> Trace:
        """The trace of the last run, which must be complete.

        Args:
            source: name of the clock.
        """
        stamps = self.workspace.stamps[0].view(-1, EVENTS.value).cpu().numpy().astype(np.int64)
        run = StageRun(self._device, self._kernel, stamps, tickets(self.workspace, 0), self._workers)
        return assemble(self._workload, {0: run}, source, None, {})


@dataclass(frozen=True)
class Times:
    """Latencies of one method, in microseconds."""

    median: float
    min: float
    max: float

    def to_json(self) -> dict[str, float]:
        return {"median": round(self.median, 2), "min": round(self.min, 2), "max": round(self.max, 2)}


def captured(call: Callable[[], object], device: int) -> Callable[[], object]:
    """The call as a CUDA graph of one device; it must have run before."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize(device)
    stream = torch.cuda.Stream(device)
    with torch.cuda.device(device), torch.cuda.graph(graph, stream=stream, capture_error_mode="relaxed"):
        call()
    return graph.replay


def interleaved(calls: Mapping[str, Callable[[], object]], device: int, rounds: int) -> dict[str, Times]:
    """Time the calls in turn, round by round, so that clocks that drift do so for all; the first rounds do not count.

    Args:
        calls: each enqueues on the current stream of `device`; others of its devices must be done when that is.
    """
    found: dict[str, list[float]] = {name: [] for name in calls}
    with torch.cuda.device(device):
        events = {name: [torch.cuda.Event(enable_timing=True) for _ in range(2)] for name in calls}
        for number in range(rounds + WARM_UP):
            for name, call in calls.items():
                begin, end = events[name]
                begin.record()
                call()
                end.record()
            torch.cuda.synchronize(device)
            if number >= WARM_UP:
                for name, (begin, end) in events.items():
                    found[name].append(begin.elapsed_time(end) * 1e3)
    return {name: Times(statistics.median(us), min(us), max(us)) for name, us in found.items()}


def resources(config: KernelConfig, protocol: str) -> dict[str, int] | None:
    """Registers and bytes of shared memory and of spills of a variant; None where the tools for that are missing.

    Args:
        protocol: "none", "producer" (announces its tiles in a queue) or "consumer" (takes its tiles from one).
    """
    tile = config.block_m, config.block_n
    workload = dense_chain(tile[0], [config.block_k, tile[1], tile[1]], tile=tile)
    layout = ProtocolLayout(workload, pipelined([0, 1]), "queue")
    buffers = {d: torch.empty(layout.size(d), dtype=torch.uint8) for d in layout.devices}
    workspace = Workspace(layout, buffers, new_records(2, "cpu"), lambda words, _: words)
    stage = int(protocol == "consumer")
    k = workload.stages[stage].k
    a, b, c = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((tile[0], k), (tile[1], k), tile))
    piece = make_piece(workspace, stage, a, b, [c], None, announce=protocol == "producer")
    try:
        launch = Launch(config, [piece], workspace, 1, TIMEOUT_US)
        code = compile_call(launch._kernel, launch._arguments, launch._options)
    except UnsupportedMachine:
        return None
    return {
        "registers": code.registers,
        "shared_bytes": code.shared_bytes,
        "spilled_bytes": code.stack_bytes + code.local_bytes,
    }
