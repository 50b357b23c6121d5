"""What both process sets share at work: operands, the fp32 reference, poison, and a clock on the GPU."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch

from tilerelay.baselines.cell import Cell
from tilerelay.baselines.deadline import LIMIT_S, wait_until
from tilerelay.baselines.method import Launch, OwnLaunch, Piece, Variant
from tilerelay.baselines.operands import Operands
from tilerelay.baselines.reference import Reference


def uuids_of(devices: Sequence[int]) -> list[str]:
    """As nvidia-smi and NVML name the GPUs, whatever CUDA_VISIBLE_DEVICES says."""
    uuids = [str(torch.cuda.get_device_properties(device).uuid) for device in devices]
    return [uuid if uuid.startswith("GPU-") else f"GPU-{uuid}" for uuid in uuids]


def fill_with_nan(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.fill_(float("nan"))


def result_of(variant: Variant, launch: Launch) -> tuple[Callable[[], Sequence[Piece]], Sequence[torch.Tensor]]:
    """(where Y is, what to poison) of a launch, which knows it itself when it brought its own graph."""
    if variant.launcher is None:
        return variant.pieces, variant.poison
    own: OwnLaunch = launch  # type: ignore[assignment]
    return own.pieces, own.poison()


class Chain:
    """Operands and reference of the cells of one shape; the largest batch serves them all."""

    def __init__(self, devices: dict[int, torch.device], cells: Sequence[Cell]) -> None:
        self._devices, self._cells = devices, list(cells)
        self._shape: tuple[int, ...] | None = None
        self._operands: Operands | None = None
        self._reference: Reference | None = None

    def operands(self, cell: Cell) -> Operands:
        if self._operands is None or self._shape != cell.shape:
            self._operands = self._reference = None
            torch.cuda.empty_cache()
            rows = max(c.m for c in self._cells if c.shape == cell.shape)
            self._operands, self._shape = Operands(self._devices, cell.widths, rows), cell.shape
        return self._operands

    def reference(self, cell: Cell) -> Reference:
        operands = self.operands(cell)
        if self._reference is None:
            self._reference = Reference(operands, next(iter(self._devices)))
        return self._reference


# Between runs, in both process sets: longer than either needs for its own work between them, so that GPUs are equally
# cool, and clocks equally high, in both.
REST_S = 0.02
HOLD_CYCLES = 1_000_000  # half a millisecond of an H200: longer than a host with cold caches takes to launch a graph


class Stopwatch:
    """Two events around a launch on one stream, a rest before it, and a hold while the host enqueues it."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._ended_at = -math.inf

    def rest(self) -> None:
        """Wait until the last run's end is `REST_S` ago."""
        time.sleep(max(0.0, self._ended_at + REST_S - time.monotonic()))

    def hold(self) -> None:
        """Keep the stream, which must be the current one, busy until all that the host enqueues next is there."""
        torch.cuda._sleep(HOLD_CYCLES)  # type: ignore[no-untyped-call]

    def start(self, launch: Launch) -> bool:
        """The launch between two events, on the stream, which must be the current one.

        Returns:
            Whether it began before the host had enqueued all of it, so that the time contains the launch.
        """
        self._begin.record(self._stream)
        launch.replay()
        self._end.record(self._stream)
        return bool(self._begin.query())

    def wait_for_start(self) -> None:
        """Until the run begins.

        Raises:
            Stuck: it never does.
        """
        wait_until(self._begin.query, LIMIT_S, "a run's start")

    def wait_us(self) -> float:
        """Microseconds between the events.

        Raises:
            Stuck: it never came to an end.
        """
        wait_until(self._end.query, LIMIT_S, "a run")
        self._ended_at = time.monotonic()
        return float(self._begin.elapsed_time(self._end) * 1e3)
