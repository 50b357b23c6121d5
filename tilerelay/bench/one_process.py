"""The one-process set: one process drives all GPUs, one CUDA graph spans them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilerelay.baselines.cell import Cell
from tilerelay.baselines.cuda_lanes import CudaLanes
from tilerelay.baselines.method import Launch, Method, Variant
from tilerelay.baselines.reference import covers, tolerance
from tilerelay.bench import methods
from tilerelay.bench.clocks import open_sampler
from tilerelay.bench.measure import Timed
from tilerelay.bench.sessions import Chain, Stopwatch, fill_with_nan, result_of, uuids_of
from tilerelay.runtime.cuda import on


class OneProcess:
    """See `tilerelay.bench.measure.Session`. All cells must be of one number of GPUs."""

    process_set = methods.ONE_PROCESS

    def __init__(self, cells: Sequence[Cell], timing: str) -> None:
        self.timing = timing
        self._gpus = cells[0].gpus
        self._lanes = CudaLanes(self._gpus)
        self._chain = Chain({gpu: torch.device("cuda", gpu) for gpu in range(self._gpus)}, cells)
        with torch.cuda.device(0):
            self._stopwatch = Stopwatch(self._lanes.stream(0))
        self._sampler = open_sampler(uuids_of(range(self._gpus)))
        self.tolerance = 0.0

    def method(self, name: str) -> Method:
        return methods.make(name)

    def variants(self, method: Method, cell: Cell) -> list[Variant]:
        self.tolerance = tolerance(cell.layers)
        made = method.variants(cell, self._chain.operands(cell), self._lanes)
        self._lanes.synchronize()  # operands were made on other streams than the lanes
        return made

    def launch(self, variant: Variant) -> Launch:
        if variant.launcher is not None:
            return variant.launcher(self.timing)
        return self._lanes.capture(variant.enqueue) if self.timing == "graph" else self._lanes.eager(variant.enqueue)

    def check(self, variant: Variant, launch: Launch, cell: Cell) -> float:
        pieces, poison = result_of(variant, launch)
        reference = self._chain.reference(cell)
        fill_with_nan(poison)
        self.time(launch)
        made = pieces()
        if not covers(made, cell.m, cell.widths[-1]):
            raise ValueError("the parts of Y that it names do not cover Y")
        return reference.worst_row_error(made)

    def time(self, launch: Launch) -> Timed:
        self._lanes.synchronize()
        self._stopwatch.rest()
        with on(self._lanes.stream(0)):
            if self.timing == "graph":
                self._stopwatch.hold()
            late = self._stopwatch.start(launch)
        self._stopwatch.wait_for_start()
        reading = self._sampler.read()  # while it runs
        us = self._stopwatch.wait_us()
        launch.finish()
        return Timed(us, reading, late)

    def agree(self, failure: str | None) -> str | None:
        return failure

    def healthy(self) -> bool:
        try:
            self._lanes.synchronize()
        except Exception:  # CUDA says in many ways that a context is gone
            return False
        return True

    def end_cell(self) -> None:
        torch.cuda.empty_cache()

    def close(self) -> None:
        self._sampler.close()
