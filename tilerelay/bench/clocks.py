"""SM clock and power of the GPUs, read while a method runs: NVML where its Python package is, else nvidia-smi."""

from __future__ import annotations

import importlib
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Reading:
    """Over the GPUs that were read: the lowest SM clock, and the highest power draw."""

    sm_clock_mhz: float
    power_w: float


class Sampler(Protocol):
    def read(self) -> Reading | None:
        """Now; None when nothing can be read."""

    def close(self) -> None: ...


class NvmlSampler:
    """Raises ImportError (no package) or NVML's error (no driver) on construction."""

    def __init__(self, uuids: Sequence[str]) -> None:
        self._nvml: Any = importlib.import_module("pynvml")
        self._nvml.nvmlInit()
        self._handles = [self._nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]

    def read(self) -> Reading:
        nvml = self._nvml
        clocks = [nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM) for handle in self._handles]
        power = [nvml.nvmlDeviceGetPowerUsage(handle) / 1000 for handle in self._handles]
        return Reading(float(min(clocks)), float(max(power)))

    def close(self) -> None:
        self._nvml.nvmlShutdown()


class SmiSampler:
    """nvidia-smi takes too long to be asked each time: one runs on, and a thread keeps its newest lines."""

    PERIOD_MS = 100

    def __init__(self, uuids: Sequence[str], command: Sequence[str] = ("nvidia-smi",)) -> None:
        self._uuids = set(uuids)
        self._newest: dict[str, tuple[float, float]] = {}
        arguments = [
            "--query-gpu=uuid,clocks.sm,power.draw",
            "--format=csv,noheader,nounits",
            f"--loop-ms={self.PERIOD_MS}",
        ]
        self._process = subprocess.Popen(
            [*command, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            cells = [cell.strip() for cell in line.split(",")]
            if len(cells) == 3 and cells[0] in self._uuids:
                try:
                    self._newest[cells[0]] = float(cells[1]), float(cells[2])
                except ValueError:
                    continue  # "[N/A]": this GPU does not tell

    def read(self) -> Reading | None:
        values = list(self._newest.values())
        return Reading(min(v[0] for v in values), max(v[1] for v in values)) if values else None

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=10)
        self._thread.join(timeout=10)


class NoSampler:
    """Neither is there; records carry no clock, which the report shows."""

    def read(self) -> None:
        return None

    def close(self) -> None:
        pass


def open_sampler(uuids: Sequence[str]) -> Sampler:
    """The best sampler that works here.

    Args:
        uuids: of the GPUs to read, as nvidia-smi prints them ("GPU-...").
    """
    try:
        return NvmlSampler(uuids)
    except Exception:  # no package, no driver, no permission: each has its own exception, none of them known here
        pass
    try:
        return SmiSampler(uuids)
    except OSError:
        return NoSampler()
