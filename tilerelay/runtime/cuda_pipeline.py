"""A pipeline on GPUs: prepare everything, launch all stages at once, eagerly or from one CUDA graph."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import torch

from tilerelay.errors import PlacementError
from tilerelay.graph.placement import Placement
from tilerelay.graph.workload import Workload
from tilerelay.kernels.config import KernelConfig
from tilerelay.kernels.protocol import EVENTS
from tilerelay.protocol.layout import ProtocolLayout, wrap32
from tilerelay.runtime import cuda
from tilerelay.runtime.launch import StageLaunch, stage_arguments
from tilerelay.runtime.oracle import TORCH_DTYPES
from tilerelay.runtime.workspace import Workspace, new_records

POLL_S = 1e-3
OUTSTANDING_RUNS = 32  # more queued launches would block the host in the middle of one


class CudaPipeline:
    """See `tilerelay.Pipeline`, which checks the arguments.

    Raises:
        UnsupportedMachine, PlacementError: before anything is launched.
    """

    def __init__(
        self,
        workload: Workload,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
        placement: Placement,
        layout: ProtocolLayout,
        configs: Sequence[KernelConfig],
        *,
        timeout_us: int,
        hold_back: bool,
        stamps: bool,
        first_epoch: int,
    ) -> None:
        self._workload, self._weights, self._biases, self._configs = workload, weights, biases, configs
        self._layout, self._hold_back, self._first_epoch = layout, hold_back, first_epoch
        self._timeout_us = timeout_us
        devices = [placement.device_of(i) for i in range(len(workload.stages))]
        sms_of = cuda.check_machine(placement.devices)
        placement.check_sms(sms_of)
        self._sms = [placement.stages[i][0].sms or sms_of[d] for i, d in enumerate(devices)]
        for i, device in enumerate(devices):
            _check_shares(placement, i, configs[i], cuda.shared_memory_limit(device))
        cuda.open_peers(placement.devices)

        # Stage i writes its output where stage i + 1 reads it; the last one keeps it.
        homes = [*devices[1:], devices[-1]]
        dtype = TORCH_DTYPES[workload.dtype]
        self.outputs = [
            torch.empty(s.grid.m, s.grid.n, dtype=dtype, device=f"cuda:{h}")
            for s, h in zip(workload.stages, homes, strict=True)
        ]
        buffers = {d: torch.empty(layout.size(d), dtype=torch.uint8, device=f"cuda:{d}") for d in layout.devices}
        records = new_records(len(workload.stages), "cuda")
        self.workspace = Workspace(layout, buffers, records, lambda words, d: words.to(f"cuda:{d}"))
        if stamps:
            for i, device in enumerate(devices):
                tiles = workload.stages[i].grid.tiles
                self.workspace.stamps[i] = torch.zeros(tiles, EVENTS.value, dtype=torch.int64, device=f"cuda:{device}")
        self._arguments = [stage_arguments(self.workspace, i, timeout_us=timeout_us) for i in range(len(devices))]
        self._later = [self._stage_launch(i, self.outputs[i - 1]) for i in range(1, len(devices))]
        self._streams = [torch.cuda.Stream(d) for d in devices]
        self._fork = cuda.Fork(self._streams, devices[0])
        self._home = devices[0]
        self._done: deque[torch.cuda.Event] = deque()
        self._spare = [torch.cuda.Event() for _ in range(OUTSTANDING_RUNS)]
        self.reset()
        self._dry_run()

    def reset(self) -> None:
        """Protocol memory as before the first run. Nothing may be running."""
        self.workspace.reset(self._first_epoch)
        self.epoch = self._first_epoch
        self.synchronize()

    def _dry_run(self) -> None:
        """Compile and load every kernel, and run each stage once, one after the other: nothing is waited for yet."""
        m, k = self._workload.stages[0].grid.m, self._workload.stages[0].k
        first = self._stage_launch(0, torch.zeros(m, k, dtype=self.outputs[0].dtype, device=f"cuda:{self._home}"))
        torch.cuda.synchronize(self._home)
        for stream, launch in zip(self._streams, [first, *self._later], strict=True):
            with cuda.on(stream):
                launch()
            stream.synchronize()
        self.epoch += 1

    def _stage_launch(self, i: int, source: torch.Tensor) -> StageLaunch:
        return StageLaunch(
            self._configs[i], self._workload.stages[i], source, self._weights[i], self.outputs[i], self._biases[i],
            self._arguments[i], self._sms[i],
        )  # fmt: skip

    def _enqueue(self, x: torch.Tensor, fork: cuda.Fork, hold_back: bool) -> None:
        launches = [self._stage_launch(0, x), *self._later]
        caller = torch.cuda.current_stream(self._home)
        fork.fork(caller)
        for i, (stream, launch) in enumerate(zip(self._streams, launches, strict=True)):  # producers first (rule 8)
            if hold_back and i:
                cuda.hold_back(stream, self.workspace.stage(i, "wake"), self.epoch)
            with cuda.on(stream):
                launch()
        fork.join(caller)

    def run(self, x: torch.Tensor) -> None:
        """Enqueue one run on the caller's current stream of the first stage's device."""
        self.order_run()
        self._enqueue(x, self._fork, self._hold_back)
        self.count_run()

    def count_run(self) -> None:
        """Keep the host's idea of the epoch, and of how many runs are outstanding, in step."""
        self.epoch += 1
        event = self._spare.pop()
        event.record(torch.cuda.current_stream(self._home))
        self._done.append(event)

    def order_run(self) -> None:
        """The caller's stream waits for the run before, whatever stream that was on; the host for the 32nd before."""
        if not self._spare:
            self._done[0].synchronize()
            self._spare.append(self._done.popleft())
        if self._done:
            torch.cuda.current_stream(self._home).wait_event(self._done[-1])

    def capture(self, x: torch.Tensor) -> CudaGraphRun:
        """One CUDA graph over all devices that runs the pipeline on x's storage."""
        graph = torch.cuda.CUDAGraph()
        fork = cuda.Fork(self._streams, self._home)
        self.synchronize()
        stream = torch.cuda.Stream(self._home)  # torch's own capture stream may be on another device
        with torch.cuda.device(self._home), torch.cuda.graph(graph, stream=stream, capture_error_mode="relaxed"):
            self._enqueue(x, fork, hold_back=False)
        return CudaGraphRun(self, graph, x, fork)

    def synchronize(self) -> None:
        """Wait for all runs. A stream that is held back longer than a wait's deadline is let go, to find out why."""
        if self._hold_back and self._done:
            deadline = time.monotonic() + self._timeout_us * 1e-6
            while not self._done[-1].query() and time.monotonic() < deadline:
                time.sleep(POLL_S)
            if not self._done[-1].query():
                for i, stream in enumerate(self._streams):
                    with cuda.on(torch.cuda.Stream(stream.device)):
                        self.workspace.stage(i, "wake").fill_(wrap32(self.epoch).item())
        for device in self._layout.devices:
            torch.cuda.synchronize(device)

    def close(self) -> None:
        """Wait for outstanding runs, then drop all memory."""
        self.synchronize()
        for name in ("outputs", "workspace", "_arguments", "_later", "_weights", "_biases"):
            setattr(self, name, None)


class CudaGraphRun:
    """A captured run; owns what the graph points at."""

    def __init__(self, pipeline: CudaPipeline, graph: torch.cuda.CUDAGraph, x: torch.Tensor, fork: cuda.Fork) -> None:
        self._pipeline, self.graph, self._x, self._fork = pipeline, graph, x, fork

    def replay(self) -> None:
        self._pipeline.order_run()
        self.graph.replay()
        self._pipeline.count_run()


def _check_shares(placement: Placement, stage: int, config: KernelConfig, shared_limit: int) -> None:
    """A share is a persistent grid at one CTA per SM: two CTAs must not fit on one (rule 8)."""
    part = placement.stages[stage][0]
    if part.sms is None:
        return
    if config.kind != "persistent":
        raise PlacementError(
            f"stage {stage}: the classical kernel takes a whole device; use kernel='persistent' for SM shares"
        )
    if 2 * config.shared_bytes <= shared_limit:
        raise PlacementError(
            f"stage {stage}: two CTAs of this tile fit on an SM, so a share would not hold; use a larger tile"
        )
