"""A pipeline on GPUs: prepare everything, launch all stages at once, eagerly or from one CUDA graph."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from functools import partial

import torch

from tilerelay.errors import PlacementError
from tilerelay.graph.cut import CutWorkload
from tilerelay.graph.placement import Placement
from tilerelay.kernels.config import MOST_SEGMENTS, KernelConfig
from tilerelay.kernels.protocol import ENDED, EVENTS, WAKE_ALL
from tilerelay.kernels.relay import RELAYS
from tilerelay.protocol.layout import ProtocolLayout, wrap32
from tilerelay.runtime import cuda
from tilerelay.runtime.launch import Launch, grid_of, make_piece, relay_of, way_of
from tilerelay.runtime.oracle import TORCH_DTYPES
from tilerelay.runtime.run_order import RunOrder
from tilerelay.runtime.tensors import OutputPlan
from tilerelay.runtime.workspace import Workspace, new_records

POLL_S = 1e-3


class CudaPipeline:
    """See `tilerelay.Pipeline`, which checks the arguments.

    Args:
        cut: the workload in parts, each on one device.
        weights, biases, configs: of every part, on its device.
        replicate: the last output whole on every device that computes a part of it.

    Raises:
        UnsupportedMachine, PlacementError: before anything is launched.
    """

    def __init__(
        self,
        cut: CutWorkload,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
        layout: ProtocolLayout,
        configs: Sequence[KernelConfig],
        *,
        replicate: bool,
        timeout_us: int,
        hold_back: bool,
        stamps: bool,
        first_epoch: int,
    ) -> None:
        self._cut, self._weights, self._biases, self._configs = cut, weights, biases, configs
        self._layout, self._hold_back, self._first_epoch = layout, hold_back, first_epoch
        self._timeout_us = timeout_us
        placement = cut.placement
        self._devices = [placement.device_of(i) for i in range(len(placement.stages))]
        self._sms_of = cuda.check_machine(placement.devices)
        placement.check_sms(self._sms_of)
        for i, device in enumerate(self._devices):
            _check_shares(placement, i, configs[i], cuda.shared_memory_limit(device))
        cuda.open_peers(placement.devices)

        dtype = TORCH_DTYPES[cut.workload.dtype]
        self._plan = OutputPlan(cut, replicate)
        self.tensors = {
            (stage, device): torch.empty(shape, dtype=dtype, device=f"cuda:{device}")
            for (stage, device), shape in self._plan.shapes.items()
        }
        self.results = [self.tensors[place] for place in self._plan.results()]
        self._copies = [self._plan.copies(part, self.tensors) for part in range(len(self._devices))]
        self._ways = [self._way(part) for part in range(len(self._devices))]
        self._relays = [relay_of(c) if w in RELAYS else None for w, c in zip(self._ways, self._copies, strict=True)]
        buffers = {d: torch.empty(layout.size(d), dtype=torch.uint8, device=f"cuda:{d}") for d in layout.devices}
        records = new_records(len(self._devices), "cuda")
        self.workspace = Workspace(layout, buffers, records, lambda words, d: words.to(f"cuda:{d}"))
        if stamps:
            for i, device in enumerate(self._devices):
                tiles = cut.workload.stages[i].grid.tiles
                self.workspace.stamps[i] = torch.zeros(tiles, EVENTS.value, dtype=torch.int64, device=f"cuda:{device}")
        first = cut.workload.stages[0]
        self.homes = [self._devices[i] for i in cut.parts_of(0)]
        self._x_shape = first.grid.m, first.k
        self._own_x: list[torch.Tensor] = []
        self._kernels = [kernel for program in cut.programs for kernel in self._kernels_of(program)]
        streams = {program: torch.cuda.Stream(self._devices[program[0]]) for program in cut.programs}
        self._streams = [streams[program] for program in cut.programs for _ in self._kernels_of(program)]
        self._launches: tuple[tuple[int, ...], list[Launch]] = ((), [])
        self._fork = cuda.Fork(list(streams.values()), self.homes[0])
        self._order = RunOrder([self.homes[0], *(d for d in layout.devices if d != self.homes[0])], self._finish)
        # Streams that no kernel is ever launched on, of another priority and so never one of those above.
        self._rescue = {device: torch.cuda.Stream(device, priority=-1) for device in layout.devices}
        # Before the memory of a pipeline that is dropped in a run is given to others:
        self._release = weakref.finalize(self, _synchronize, layout.devices)
        self.reset()
        try:
            self._dry_run()
        except BaseException:
            _synchronize(layout.devices)
            raise

    def _kernels_of(self, program: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The parts that follow each other on a device: one kernel walks over all neighbours that have the same one."""
        kernels: list[tuple[int, ...]] = []
        for part in program:
            same = bool(kernels) and self._configs[kernels[-1][0]] == self._configs[part]
            if same and len(kernels[-1]) < MOST_SEGMENTS and self._configs[part].kind == "persistent":
                kernels[-1] = (*kernels[-1], part)
            else:
                kernels.append((part,))
        return kernels

    def launches(self, x: Sequence[torch.Tensor]) -> list[Launch]:
        """All kernels' launches for an input, one tensor for each part of the first stage; made when x is another.

        The newest launches hold their input, so its address stays its own.
        """
        where = tuple(tensor.data_ptr() for tensor in x)
        if where != self._launches[0]:
            self._launches = where, [self._launch(kernel, x) for kernel in self._kernels]
        return self._launches[1]

    def _launch(self, parts: tuple[int, ...], x: Sequence[torch.Tensor]) -> Launch:
        pieces = []
        for part in parts:
            place = self._plan.source(part)
            source = x[self._cut.origin[part][1]] if place is None else self.tensors[place]
            pieces.append(
                make_piece(
                    self.workspace, part, source, self._weights[part], self._copies[part], self._biases[part],
                    way=self._ways[part], relay=self._relays[part],
                )
            )  # fmt: skip
        stages = [self._cut.workload.stages[part] for part in parts]
        config = self._configs[parts[0]]
        grid = grid_of(config.kind, stages, self._sms(parts[0]))
        return Launch(config, pieces, self.workspace, grid, self._timeout_us)

    def _sms(self, part: int) -> int:
        return self._cut.placement.stages[part][0].sms or self._sms_of[self._devices[part]]

    def _way(self, part: int) -> int:
        readers = {self._cut.workload.edges[edge].consumer for edge in self._layout.out_edges(part)}
        program = next(program for program in self._cut.programs if part in program)
        return way_of(
            self._configs[part].kind, self._cut.workload.stages[part], len(self._copies[part]), self._sms(part),
            last=not readers, read_later=bool(readers & set(program)),
        )  # fmt: skip

    def reset(self) -> None:
        """Protocol memory as before the first run. Nothing may be running."""
        self.workspace.reset(self._first_epoch)
        self._order.runs = 0
        self.synchronize()

    @property
    def epoch(self) -> int:
        """Number of the next run."""
        return self._first_epoch + self._order.runs

    def _dry_run(self) -> None:
        """Compile every kernel and load it on its device; when nothing can hold up a launch any more, run once."""
        dtype = self.results[0].dtype
        inputs = [torch.zeros(*self._x_shape, dtype=dtype, device=f"cuda:{home}") for home in self.homes]
        for stream, launch in zip(self._streams, self.launches(inputs), strict=True):
            with cuda.on(stream):
                launch.load()
        torch.cuda.synchronize(self.homes[0])
        self.run(inputs)
        self.synchronize()
        self._launches = ((), [])

    def _inputs(self, x: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """x for every part of the first stage; where it is given once, the tensors to copy it into."""
        if len(x) == len(self.homes):
            return list(x)
        if not self._own_x:
            self._own_x = [torch.empty(*self._x_shape, dtype=x[0].dtype, device=f"cuda:{d}") for d in self.homes[1:]]
        return [*x, *self._own_x]

    def _enqueue(self, x: Sequence[torch.Tensor], fork: cuda.Fork, hold_back: bool) -> None:
        caller = torch.cuda.current_stream(self.homes[0])
        inputs = self._inputs(x)
        launches = self.launches(inputs)
        fork.fork(caller)
        for home, copy in zip(self.homes[1:], inputs[1:], strict=True) if len(x) < len(inputs) else ():
            with cuda.on(next(stream for stream in self._streams if stream.device_index == home)):
                copy.copy_(x[0], non_blocking=True)
        # Producers first (rule 8): the kernels that begin with the earliest stage.
        order = sorted(range(len(launches)), key=lambda i: self._kernels[i][0])
        for i in order:
            if hold_back and self._layout.in_edges(self._kernels[i][0]):
                cuda.hold_back(self._streams[i], self.workspace.stage(self._kernels[i][0], "wake"), self.epoch)
            with cuda.on(self._streams[i]):
                launches[i]()
        fork.join(caller)

    def run(self, x: Sequence[torch.Tensor]) -> None:
        """Enqueue one run on the caller's current stream of the first stage's device.

        Args:
            x: [M, K] for every part of the first stage, or once, on the first one's device, to be copied to the others.
        """

        def launch() -> None:
            try:
                self._enqueue(x, self._fork, self._hold_back)
            except BaseException:  # some stages are launched, others not: they would wait, and their epochs differ
                self._abandon()
                raise

        self._order.run(launch)

    def capture(self, x: Sequence[torch.Tensor], *, all_streams: bool) -> CudaGraphRun:
        """One CUDA graph over all devices that runs the pipeline on x's storage.

        Args:
            all_streams: replays are ordered on the current streams of all devices (see `RunOrder.run`).
        """
        graph = torch.cuda.CUDAGraph()
        fork = cuda.Fork(self._fork.streams, self.homes[0])
        self._inputs(x)
        self.synchronize()
        stream = torch.cuda.Stream(self.homes[0])  # torch's own capture stream may be on another device
        with torch.cuda.device(self.homes[0]), torch.cuda.graph(graph, stream=stream, capture_error_mode="relaxed"):
            self._enqueue(x, fork, hold_back=False)
        return CudaGraphRun(self, graph, x, fork, all_streams)

    def synchronize(self) -> None:
        """Wait for all runs."""
        if self._order.last is not None:
            self._finish(self._order.last)
        _synchronize(self._layout.devices)

    def _finish(self, run: torch.cuda.Event) -> None:
        """Wait for a run. A stream that is held back longer than a wait's deadline is let go, to find out why."""
        if self._hold_back:
            deadline = time.monotonic() + self._timeout_us * 1e-6
            while not run.query() and time.monotonic() < deadline:
                time.sleep(POLL_S)
            if not run.query():
                self._write("wake", wrap32(self.epoch).item())
        run.synchronize()

    def _write(self, name: str, value: int) -> None:
        """Write a word of every part's memory by the copy engine, past whatever its streams and SMs are busy with."""
        word = torch.tensor([value], dtype=torch.int32, pin_memory=True)
        for part, device in enumerate(self._devices):
            with cuda.on(self._rescue[device]):
                self.workspace.stage(part, name).copy_(word, non_blocking=True)
        for stream in self._rescue.values():
            stream.synchronize()

    def _abandon(self) -> None:
        """End a run that was launched in part, after the runs before it, and put all memory back."""
        if self._order.last is not None:
            self._finish(self._order.last)
        self._write("abort", ENDED.value)
        self._write("wake", wrap32(self.epoch + WAKE_ALL.value).item())
        _synchronize(self._layout.devices)
        # Where an earlier run was ended, too, the next to use the pipeline is told, and resets it.
        if not self.workspace.aborted:
            self.reset()

    def close(self) -> None:
        """Wait for outstanding runs, then drop all memory."""
        self.synchronize()
        self._release.detach()
        names = "tensors results workspace _copies _relays _own_x _launches _weights _biases"
        for name in names.split():
            setattr(self, name, None)


class CudaGraphRun:
    """A captured run, with what it needs to stay alive beside its pipeline."""

    def __init__(
        self,
        pipeline: CudaPipeline,
        graph: torch.cuda.CUDAGraph,
        x: Sequence[torch.Tensor],
        fork: cuda.Fork,
        all_streams: bool,
    ) -> None:
        self._pipeline, self._graph, self._x, self._fork = pipeline, graph, x, fork
        # No method, whose frame would cost latency (see `RunOrder.run`).
        self.replay = partial(pipeline._order.run, graph.replay, all_streams)


def _synchronize(devices: Sequence[int]) -> None:
    for device in devices:
        torch.cuda.synchronize(device)


def _check_shares(placement: Placement, stage: int, config: KernelConfig, shared_limit: int) -> None:
    """A share is a persistent grid at one CTA per SM: two CTAs must not fit on one (rule 8)."""
    part = placement.stages[stage][0]
    if part.sms is None:
        return
    if config.kind != "persistent":
        raise PlacementError(
            f"stage {stage}: the classical kernel takes a whole device; use kernel='persistent' for SM shares"
        )
    if 2 * config.shared_bytes_at_least <= shared_limit:
        raise PlacementError(
            f"stage {stage}: two CTAs of this tile fit on an SM, so a share would not hold; use a larger tile"
        )
