"""The one-process session with its real methods, operands, poison and check; only streams and clock stand in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tilerelay.baselines.cell import Cell
from tilerelay.baselines.micro_batch import MicroBatchDirect
from tilerelay.bench import one_process
from tilerelay.bench.measure import Timed, measure_cell
from tilerelay.bench.methods import PROCESS_SETS
from tilerelay.bench.one_process import OneProcess
from tilerelay.bench.records import Record
from tilerelay.bench.sessions import Chain

CELLS = [Cell(2, 2, 512, 64, 64), Cell(2, 2, 1024, 64, 64), Cell(1, 1, 512, 64, 64)]
NEED_GPUS = ("pipelined", "sharded", "sharded-replicated", "hybrid-tp")


class OrderedLanes:
    """Everything at once, in the order in which it is enqueued."""

    def __init__(self, gpus: int) -> None:
        self.gpus = gpus

    def mm(self, gpu: int, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
        torch.mm(x, w.t(), out=out)

    def send(self, source_gpu: int, source: torch.Tensor, target_gpu: int, target: torch.Tensor) -> None:
        target.copy_(source)

    def all_reduce(self, tensors: Mapping[int, torch.Tensor], lane: str) -> None:
        total = torch.stack(list(tensors.values())).sum(0)
        for tensor in tensors.values():
            tensor.copy_(total)

    def mark(self, gpu: int, lane: str) -> None: ...

    def wait(self, gpu: int, lane: str, mark: None) -> None: ...

    def peer_view(self, tensor: torch.Tensor, gpu: int) -> torch.Tensor:
        return tensor

    def capture(self, body: Callable[[], None]) -> Any:
        return CpuLaunch(body)

    def synchronize(self) -> None: ...


class CpuLaunch:
    def __init__(self, body: Callable[[], None]) -> None:
        self.replay = body

    def close(self) -> None: ...


class CpuSession(OneProcess):
    def __init__(self, cells: list[Cell]) -> None:
        self.timing, self.tolerance = "graph", 0.0
        self._lanes = OrderedLanes(cells[0].gpus)  # type: ignore[assignment]
        self._chain = Chain({gpu: torch.device("cpu") for gpu in range(cells[0].gpus)}, cells)
        self.runs = 0

    def time(self, launch: Any) -> Timed:
        launch.replay()
        self.runs += 1
        return Timed(float(self.runs), None)


def measured(session: CpuSession, cell: Cell) -> dict[str, Record]:
    names = [name for name in PROCESS_SETS["one-process"] if name not in NEED_GPUS]
    records = measure_cell(session, cell, names, rounds=2, emit=lambda event: None)
    return {record.method: Record.from_json(record.to_json()) for record in records}


def test_all_baselines_are_right_in_bf16_on_cells_that_share_operands() -> None:
    session = CpuSession(CELLS[:2])
    for cell in CELLS[:2]:
        for name, record in measured(session, cell).items():
            assert record.status == "ok" and record.reason is None, (name, record.reason)
            assert name == "floor" or 1e-4 < record.check_error < session.tolerance  # type: ignore[operator]
    assert record.m == 1024


def test_one_gpu_has_the_sequential_method_alone() -> None:
    statuses = {name: record.status for name, record in measured(CpuSession(CELLS[2:]), CELLS[2]).items()}
    assert {name for name, status in statuses.items() if status == "ok"} == {"floor", "sequential"}
    assert set(statuses.values()) == {"ok", "skipped"}


def test_a_baseline_that_leaves_rows_out_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last chunk is never computed: NaN stays where it should have come."""
    from tilerelay.baselines import micro_batch

    chunks = micro_batch.row_chunks
    monkeypatch.setattr(micro_batch, "row_chunks", lambda m, size: chunks(m, size)[:-1])
    records = measured(CpuSession(CELLS[:1]), CELLS[0])
    assert records[MicroBatchDirect.name].status == "error"
    assert "wrong result: a row is off by nan" in str(records[MicroBatchDirect.name].reason)
    assert records["tp-nccl"].status == "ok"


@pytest.mark.parametrize(("timing", "expected"), [("graph", ["hold", "start"]), ("eager", ["start"])])
def test_a_graphs_launch_is_not_timed(timing: str, expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    session: Any = OneProcess.__new__(OneProcess)
    session.timing = timing
    session._lanes = SimpleNamespace(synchronize=lambda: None, stream=lambda gpu: None)
    session._sampler = SimpleNamespace(read=lambda: None)
    session._stopwatch = SimpleNamespace(
        rest=lambda: None,
        hold=lambda: steps.append("hold"),
        start=lambda launch: steps.append("start") or timing == "eager",
        wait_for_start=lambda: steps.append("wait"),
        wait_us=lambda: 1.0,
    )
    monkeypatch.setattr(one_process, "on", nullcontext)
    assert session.time(SimpleNamespace(finish=lambda: None)) == Timed(1.0, None, timing == "eager")
    assert steps == [*expected, "wait"]
