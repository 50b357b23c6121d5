"""The torchrun set: a process and a CUDA graph per GPU; a run's latency is the slowest rank's.

Control runs over gloo on the CPU: a rank with nothing to do waits there and not inside NCCL, whose waiting kernel would
hold SMs. Before each run the GPUs themselves meet at a barrier on the timed stream, so that the ranks' clocks start
within microseconds and a late host does not lengthen anybody's run.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tilerelay.baselines.cell import Cell
from tilerelay.baselines.method import Launch, RankMethod, Variant
from tilerelay.baselines.rank_ops import CudaRankOps
from tilerelay.baselines.reference import tolerance
from tilerelay.bench import methods
from tilerelay.bench.clocks import Reading, open_sampler
from tilerelay.bench.measure import Timed
from tilerelay.bench.sessions import Chain, Stopwatch, fill_with_nan, uuids_of

PATIENCE = timedelta(seconds=120)


class Ranks:
    """See `tilerelay.bench.measure.Session`. One rank of it; every rank makes the same calls in the same order."""

    process_set = methods.TORCHRUN

    def __init__(self, cells: Sequence[Cell], timing: str) -> None:
        self.timing = timing
        local = int(os.environ["LOCAL_RANK"])
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, timeout=PATIENCE)
        self.rank, world = dist.get_rank(), dist.get_world_size()
        if any(cell.gpus != world for cell in cells):
            raise ValueError(f"{world} ranks, but cells for {sorted({c.gpus for c in cells})} GPUs")
        self._control = dist.new_group(backend="gloo", timeout=PATIENCE)
        largest = max(cell.m * max(cell.widths) * torch.bfloat16.itemsize for cell in cells)
        self._ops = CudaRankOps(workspace_bytes=2 * largest)
        self._chain = Chain({self.rank: device}, cells)
        self._stopwatch = Stopwatch(self._ops.stream)
        self._sampler = open_sampler(uuids_of([local]))
        self.tolerance = 0.0

    def method(self, name: str) -> RankMethod:
        return methods.make_rank(name)

    def variants(self, method: RankMethod, cell: Cell) -> list[Variant]:
        self.tolerance = tolerance(cell.layers)
        made = method.variants(cell, self._chain.operands(cell), self._ops)
        self._ops.synchronize()
        return made

    def launch(self, variant: Variant) -> Launch:
        return self._ops.capture(variant.enqueue) if self.timing == "graph" else self._ops.eager(variant.enqueue)

    def check(self, variant: Variant, launch: Launch, cell: Cell) -> float:
        reference = self._chain.reference(cell)
        fill_with_nan([*variant.poison, *(piece.tensor for piece in variant.pieces())])
        self.time(launch)
        return reference.worst_row_error(variant.pieces())

    def time(self, launch: Launch) -> Timed:
        self._ops.synchronize()
        self._stopwatch.rest()
        dist.barrier(group=self._control)
        with torch.cuda.stream(self._ops.stream):
            if self.timing == "graph":
                self._stopwatch.hold()
            self._ops.align()
            late = self._stopwatch.start(launch)
        self._stopwatch.wait_for_start()
        reading = self._sampler.read()
        us = self._stopwatch.wait_us()
        seen: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(seen, (us, reading, late), group=self._control)
        readings = [r for _, r, _ in seen if r is not None]
        slowest = Reading(min(r.sm_clock_mhz for r in readings), max(r.power_w for r in readings)) if readings else None
        return Timed(max(us for us, _, _ in seen), slowest, any(late for _, _, late in seen))

    def agree(self, failure: str | None) -> str | None:
        seen: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(seen, failure, group=self._control)
        return next((f"rank {rank}: {text}" for rank, text in enumerate(seen) if text is not None), None)

    def healthy(self) -> bool:
        try:
            self._ops.synchronize()
        except Exception:  # CUDA says in many ways that a context is gone
            return False
        return True

    def end_cell(self) -> None:
        torch.cuda.synchronize()
        dist.barrier(group=self._control)

    def close(self) -> None:
        """Meet the other ranks; the caller then leaves with os._exit, as NCCL's teardown can hang with graphs alive."""
        torch.cuda.synchronize()
        dist.barrier(group=self._control)
        self._sampler.close()
