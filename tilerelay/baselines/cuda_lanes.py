"""Lanes on real GPUs: streams, events, peer memory, and the capture of one CUDA graph over all devices."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping

import torch
import torch.cuda.nccl as nccl

from tilerelay.baselines.deadline import drain
from tilerelay.baselines.lanes import LANES, Lane
from tilerelay.baselines.method import Launch
from tilerelay.runtime.cuda import on, open_peers


def _new_stream(gpu: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(gpu)  # type: ignore[no-untyped-call]


class CudaLanes:
    """See `Lanes`. GPU i is device i.

    Raises:
        UnsupportedMachine: two of the GPUs cannot reach each other's memory.
    """

    def __init__(self, gpus: int) -> None:
        self.gpus = gpus
        # torch opens a peer's memory at the first copy to it; kernels that write there need it open before.
        open_peers(range(gpus))
        self._streams = {(gpu, lane): _new_stream(gpu) for gpu in range(gpus) for lane in LANES}

    def stream(self, gpu: int, lane: Lane = "main") -> torch.cuda.Stream:
        return self._streams[gpu, lane]

    def mm(self, gpu: int, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
        with on(self.stream(gpu)):
            torch.mm(x, w.t(), out=out)

    def send(self, source_gpu: int, source: torch.Tensor, target_gpu: int, target: torch.Tensor) -> None:
        # torch copies on the source's current stream and orders it against the target's current stream in both
        # directions. In a capture both must be capturing, so the target gets a lane of its own: with its main lane
        # the copy would wait for the target's GEMMs.
        with on(self.stream(target_gpu, "receive")), on(self.stream(source_gpu, "copy")):
            target.copy_(source, non_blocking=True)

    def all_reduce(self, tensors: Mapping[int, torch.Tensor], lane: Lane) -> None:
        streams = [self.stream(gpu, lane) for gpu in tensors]
        nccl.all_reduce(list(tensors.values()), streams=streams)  # type: ignore[no-untyped-call]

    def mark(self, gpu: int, lane: Lane) -> torch.cuda.Event:
        with torch.cuda.device(gpu):
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self.stream(gpu, lane))
        return event

    def wait(self, gpu: int, lane: Lane, mark: torch.cuda.Event) -> None:
        self.stream(gpu, lane).wait_event(mark)

    def peer_view(self, tensor: torch.Tensor, gpu: int) -> torch.Tensor:
        if not tensor.is_contiguous():
            raise ValueError("a peer view needs contiguous memory")
        size = tensor.numel() * tensor.element_size()
        storage = torch._C._construct_storage_from_data_pointer(tensor.data_ptr(), torch.device("cuda", gpu), size)
        view = torch.empty(0, dtype=tensor.dtype, device=f"cuda:{gpu}")
        return view.set_(storage, 0, tensor.shape, tensor.stride())

    def run(self, body: Callable[[], None]) -> None:
        with on(self.stream(0)):
            self._fork()
            body()
            self._join()

    def _fork(self) -> None:
        begin = self.mark(0, "main")
        for gpu, lane in self._streams:
            if (gpu, lane) != (0, "main"):
                self.wait(gpu, lane, begin)

    def _join(self) -> None:
        for gpu, lane in self._streams:
            if (gpu, lane) != (0, "main"):
                self.wait(0, "main", self.mark(gpu, lane))

    def capture(self, body: Callable[[], None]) -> Launch:
        # The eager run makes cuBLAS workspaces, NCCL communicators and kernel loads happen outside the capture.
        self.run(body)
        self.synchronize()
        with on(self.stream(0)):
            # Streams of several devices take part; nothing but "relaxed" was tried with that.
            graph = record_graph(lambda: self.run(body), capture_error_mode="relaxed")
        self.synchronize()
        return GraphLaunch(graph)

    def eager(self, body: Callable[[], None]) -> Launch:
        self.run(body)
        self.synchronize()
        return EagerLaunch(lambda: self.run(body))

    def synchronize(self) -> None:
        drain(self._streams.values())
        drain(torch.cuda.default_stream(gpu) for gpu in range(self.gpus))
        for gpu in range(self.gpus):
            torch.cuda.synchronize(gpu)


def record_graph(body: Callable[[], None], *, capture_error_mode: str) -> torch.cuda.CUDAGraph:
    """A body, captured on the current stream.

    Not with `torch.cuda.graph`: that empties the allocator's cache each time, which takes long and fails in every later
    capture once one was broken off.
    """
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode=capture_error_mode)
    try:
        body()
    except BaseException:
        with contextlib.suppress(Exception):  # says only that the capture was broken off
            graph.capture_end()
        raise
    graph.capture_end()
    return graph


class GraphLaunch:
    """A captured graph, replayed on the current stream. Its operands belong to the caller and must outlive it."""

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph: torch.cuda.CUDAGraph | None = graph

    def replay(self) -> None:
        assert self._graph is not None, "the launch is closed"
        self._graph.replay()

    def finish(self) -> None:
        pass

    def close(self) -> None:
        self._graph = None


class EagerLaunch:
    """A body that is enqueued anew each time."""

    def __init__(self, body: Callable[[], None]) -> None:
        self._body = body

    def replay(self) -> None:
        self._body()

    def finish(self) -> None:
        pass

    def close(self) -> None:
        pass
