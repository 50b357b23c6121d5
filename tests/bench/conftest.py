"""Made-up machines, records and results for the bench's tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tilerelay.baselines.cell import Cell
from tilerelay.bench.records import Record, blank
from tilerelay.bench.results import Results
from tilerelay.bench.run import label

MACHINE = {
    "gpu": "NVIDIA H200",
    "gpus": 2,
    "host": "0123abcd",
    "driver": "580.1",
    "cuda": "13.0",
    "nccl": "2.28",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "python": "3.12.3",
    "commit": "abc1234",
}

# Ratios to the floor, in the direction that measurements have.
RATIOS = {
    "one-process": {
        "floor": 1.0,
        "sequential": 2.02,
        "microbatch-direct": 1.40,
        "microbatch-copy": 1.23,
        "tp-nccl": 1.35,
        "weight-streaming": 1.05,
        "pipelined": 1.15,
        "hybrid-tp": 1.5,
    },
    "torchrun": {"floor": 1.0, "tp-nccl": 1.36, "tp-two-shot": 1.30, "async-tp": 1.13},
}


@pytest.fixture
def machine() -> dict[str, Any]:
    return dict(MACHINE)


@pytest.fixture
def make_record() -> Callable[..., Record]:
    def make(cell: Cell, method: str, process_set: str = "one-process", us: float = 100.0, **changes: Any) -> Record:
        record = blank(cell, method, process_set, "graph", "ok")
        record.median_us, record.min_us, record.max_us, record.rounds = us, us * 0.99, us * 1.02, 12
        record.sm_clock_mhz, record.power_w, record.variant = 1700.0, 640.0, "whole batch"
        record.x_lives, record.y_lives, record.replicated = "GPU 0", "GPU 1", "nothing"
        for name, value in changes.items():
            setattr(record, name, value)
        return label(record)

    return make


@pytest.fixture
def make_results(make_record: Callable[..., Record], machine: dict[str, Any]) -> Callable[..., Results]:
    """Every method of RATIOS on the two-GPU cells of the given sizes."""

    def make(*ms: int) -> Results:
        records = []
        for m in ms:
            cell = Cell(2, 2, m, 8192, 8192)
            for process_set, ratios in RATIOS.items():
                floor = m * (0.2 if process_set == "one-process" else 0.18)
                for method, ratio in ratios.items():
                    us = floor * ratio
                    compute = us * 0.75 if method in ("tp-nccl", "hybrid-tp") else None
                    record = make_record(cell, method, process_set, us, ratio_to_floor=ratio, compute_us=compute)
                    records.append(record)
        return Results(machine, records)

    return make
