"""What a rank of the torchrun set may enqueue, and how it does so on a GPU: NCCL and symmetric memory, no multicast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from tilerelay.baselines.cuda_lanes import EagerLaunch, GraphLaunch, record_graph
from tilerelay.baselines.deadline import drain
from tilerelay.baselines.method import Launch


class RankOps(Protocol):
    """All calls but `mm` are collective: every rank makes them in the same order."""

    rank: int
    world: int

    def mm(self, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
        """`out[M, N] = x[M, K] @ w[N, K].T`."""

    def all_reduce(self, y: torch.Tensor) -> None:
        """NCCL sum, in place."""

    def symmetric(self, rows: int, width: int) -> torch.Tensor:
        """[rows, width] of symmetric memory; the same one for the same sizes."""

    def two_shot_all_reduce(self, y: torch.Tensor) -> None:
        """In-place sum of leading rows of symmetric memory: every rank reduces its part and writes it to all."""

    def mm_reduce_scatter(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """`x[M, K] @ w[N, K].T` summed over ranks; this rank's [M / world, N]. GEMM chunks overlap the exchange."""

    def gather_mm(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """`X[M, K] @ w[N, K].T` with X gathered from all ranks' x[M / world, K]; the exchange overlaps GEMM chunks."""


class CudaRankOps:
    """One rank on its GPU, in the default process group.

    Args:
        workspace_bytes: room for the largest exchange. Growing it later would move it away under captured graphs.
    """

    def __init__(self, workspace_bytes: int) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._group = dist.group.WORLD.group_name  # type: ignore[union-attr]
        self._symmetric: dict[tuple[int, int], torch.Tensor] = {}
        symmetric_memory.get_symm_mem_workspace(self._group, min_size=workspace_bytes)
        self._gate = symmetric_memory.empty(64, dtype=torch.int32, device=self.device)
        self._gate_handle = symmetric_memory.rendezvous(self._gate, self._group)
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    @property
    def stream(self) -> torch.cuda.Stream:
        """The stream that the rank's work is enqueued on."""
        return self._stream

    def mm(self, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
        torch.mm(x, w.t(), out=out)

    def all_reduce(self, y: torch.Tensor) -> None:
        dist.all_reduce(y)

    def symmetric(self, rows: int, width: int) -> torch.Tensor:
        if (rows, width) not in self._symmetric:
            tensor = symmetric_memory.empty(rows, width, dtype=torch.bfloat16, device=self.device)
            symmetric_memory.rendezvous(tensor, self._group)
            self._symmetric[rows, width] = tensor
        return self._symmetric[rows, width]

    def two_shot_all_reduce(self, y: torch.Tensor) -> None:
        torch.ops.symm_mem.two_shot_all_reduce_(y, "sum", self._group)

    def mm_reduce_scatter(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(x, w.t(), "sum", 0, self._group)  # type: ignore[no-any-return]

    def gather_mm(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        _, (out,) = torch.ops.symm_mem.fused_all_gather_matmul(x, [w.t()], 0, self._group)
        return out  # type: ignore[no-any-return]

    def align(self) -> None:
        """Enqueue a barrier over the GPUs themselves, so that all ranks' clocks start within microseconds."""
        self._gate_handle.barrier(channel=0)

    def capture(self, body: Callable[[], None]) -> Launch:
        """Run a body to warm up, then record it in this rank's CUDA graph."""
        self._warm_up(body)
        with torch.cuda.stream(self._stream):
            # NCCL's watchdog looks at events from its own thread meanwhile: an error in a "global" capture.
            graph = record_graph(body, capture_error_mode="thread_local")
        self.synchronize()
        return GraphLaunch(graph)

    def eager(self, body: Callable[[], None]) -> Launch:
        """A launch that enqueues the body anew each time."""
        self._warm_up(body)
        return EagerLaunch(body)

    def _warm_up(self, body: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream):
            for _ in range(2):
                body()
        self.synchronize()

    def synchronize(self) -> None:
        """Wait for this rank's GPU.

        Raises:
            Stuck: it never came to an end.
        """
        drain([self._stream, torch.cuda.default_stream()])
        torch.cuda.synchronize()
