"""What a one-process method may enqueue: GEMMs, copies, all-reduces and waits on named streams of every GPU.

Methods speak to this interface and not to torch's streams, for two reasons. They stay readable, and their waits can be
tested without a GPU: a test double runs the enqueued work in any order that the waits allow and compares the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

import torch

from tilerelay.baselines.method import Launch

Lane = Literal["main", "copy", "receive"]
LANES: tuple[Lane, ...] = ("main", "copy", "receive")


class Lanes(Protocol):
    """Streams of all GPUs. Work on one lane of one GPU runs in order; lanes are ordered by `mark` and `wait` alone."""

    gpus: int

    def mm(self, gpu: int, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
        """`out[M, N] = x[M, K] @ w[N, K].T` on the GPU's main lane."""

    def send(self, source_gpu: int, source: torch.Tensor, target_gpu: int, target: torch.Tensor) -> None:
        """Copy with the copy engine. Ordered on the source's copy lane and on the target's receive lane, both ways."""

    def all_reduce(self, tensors: Mapping[int, torch.Tensor], lane: Lane) -> None:
        """NCCL sum, in place, of one tensor per GPU, on that lane of each of these GPUs."""

    def mark(self, gpu: int, lane: Lane) -> Any:
        """A point in a lane: all that was enqueued on it so far."""

    def wait(self, gpu: int, lane: Lane, mark: Any) -> None:
        """What is enqueued on the lane from now on runs after the mark."""

    def peer_view(self, tensor: torch.Tensor, gpu: int) -> torch.Tensor:
        """The same memory, for a kernel on another GPU to write into. Does not keep the memory alive."""

    def run(self, body: Callable[[], None]) -> None:
        """Enqueue a body: every lane starts after the first GPU's main lane, which goes on after every lane."""

    def capture(self, body: Callable[[], None]) -> Launch:
        """Run a body once to warm up, then record it in one CUDA graph over all GPUs."""

    def eager(self, body: Callable[[], None]) -> Launch:
        """A launch that enqueues the body anew each time."""

    def synchronize(self) -> None:
        """Wait for all GPUs. Raises Stuck when some work never comes to an end."""
