"""Stand-ins for GPUs: lanes that run their work in any order that the waits allow, and ranks that are threads."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from tilerelay.baselines.operands import Operands
from tilerelay.baselines.rank_ops import RankOps


class DeferredLanes:
    """Enqueued work is kept with what it must wait for, and then run in a random order among all that are allowed.

    A method that forgets a wait gives a wrong result in some order. `wait` can be made to do nothing, to see that.
    """

    def __init__(self, gpus: int, seed: int, *, ignore_waits: bool = False) -> None:
        self.gpus = gpus
        self._random = random.Random(seed)
        self._ignore_waits = ignore_waits
        self._work: list[tuple[set[int], Callable[[], None]]] = []
        self._last: dict[tuple[int, str], set[int]] = {}

    def _add(self, lanes: list[tuple[int, str]], work: Callable[[], None]) -> None:
        self._work.append((set().union(*(self._last.get(lane, set()) for lane in lanes)), work))
        for lane in lanes:
            self._last[lane] = {len(self._work) - 1}

    def mm(self, gpu: int, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
        self._add([(gpu, "main")], lambda: out.copy_(x @ w.t()))

    def send(self, source_gpu: int, source: torch.Tensor, target_gpu: int, target: torch.Tensor) -> None:
        self._add([(source_gpu, "copy"), (target_gpu, "receive")], lambda: target.copy_(source))

    def all_reduce(self, tensors: Mapping[int, torch.Tensor], lane: str) -> None:
        def work() -> None:
            total = torch.stack(list(tensors.values())).sum(0)
            for tensor in tensors.values():
                tensor.copy_(total)

        self._add([(gpu, lane) for gpu in tensors], work)

    def mark(self, gpu: int, lane: str) -> set[int]:
        return set(self._last.get((gpu, lane), set()))

    def wait(self, gpu: int, lane: str, mark: set[int]) -> None:
        if not self._ignore_waits:
            self._last[gpu, lane] = self._last.get((gpu, lane), set()) | mark

    def peer_view(self, tensor: torch.Tensor, gpu: int) -> torch.Tensor:
        return tensor

    def run(self, body: Callable[[], None]) -> None:
        self._work, self._last = [], {}
        body()
        left = dict(enumerate(self._work))
        while left:
            ready = [i for i, (needs, _) in left.items() if not needs & left.keys()]
            left.pop(self._random.choice(ready))[1]()


class ThreadOps:
    """One rank of several in threads; collectives exchange through a list and two barriers."""

    def __init__(
        self, rank: int, world: int, barrier: threading.Barrier, board: list[Any], symmetric: dict[Any, Any]
    ) -> None:
        self.rank, self.world = rank, world
        self._barrier, self._board, self._memory = barrier, board, symmetric

    def _exchange(self, value: torch.Tensor) -> list[torch.Tensor]:
        self._board[self.rank] = value.clone()
        self._barrier.wait()
        seen = list(self._board)
        self._barrier.wait()
        return seen

    def mm(self, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x @ w.t())

    def all_reduce(self, y: torch.Tensor) -> None:
        y.copy_(torch.stack(self._exchange(y)).sum(0))

    def symmetric(self, rows: int, width: int) -> torch.Tensor:
        return self._memory.setdefault((self.rank, rows, width), torch.empty(rows, width))

    def two_shot_all_reduce(self, y: torch.Tensor) -> None:
        self.all_reduce(y)

    def mm_reduce_scatter(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        total = torch.stack(self._exchange(x @ w.t())).sum(0)
        return total.chunk(self.world)[self.rank].clone()

    def gather_mm(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._exchange(x)) @ w.t()


@pytest.fixture
def deferred_lanes() -> type[DeferredLanes]:
    return DeferredLanes


@pytest.fixture
def cpu_operands() -> Callable[..., Operands]:
    """(gpus, widths, rows) -> operands in fp32, every "GPU" with tensors of its own."""

    def make(gpus: int, widths: tuple[int, ...], rows: int) -> Operands:
        return Operands({gpu: torch.device("cpu") for gpu in range(gpus)}, widths, rows, dtype=torch.float32)

    return make


@pytest.fixture
def run_ranks() -> Callable[..., list[Any]]:
    """(world, function) -> what function(ops) returned on every rank, each in a thread."""

    def run(world: int, function: Callable[[RankOps], Any]) -> list[Any]:
        barrier, board, memory = threading.Barrier(world, timeout=20), [None] * world, {}
        results: list[Any] = [None] * world

        def work(rank: int) -> None:
            try:
                results[rank] = function(ThreadOps(rank, world, barrier, board, memory))
            except BaseException as error:
                results[rank] = error
                barrier.abort()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    return run
