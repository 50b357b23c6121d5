"""A virtual device that can be told to be slow, to stop, or to break the protocol in its next run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from tilerelay.kernels import gemm_classical, protocol
from tilerelay.runtime.virtual_program import DeviceProgram


@contextmanager
def replaced(module: ModuleType, name: str, by: Callable[..., Any]) -> Iterator[None]:
    """Interpreted kernels are Python functions: they find what stands in their module when they run."""
    original = getattr(module, name)
    setattr(module, name, by)
    try:
        yield
    finally:
        setattr(module, name, original)


class FaultyProgram(DeviceProgram):
    """Misbehaves once, in the run after `misbehave`."""

    fault: Callable[[], None] | None = None

    def misbehave(self, fault: str, *arguments: Any) -> None:
        self.fault = lambda: getattr(self, fault)(*arguments)

    def run(self) -> None:
        fault, self.fault = self.fault or super().run, None
        fault()

    def well(self) -> None:
        DeviceProgram.run(self)

    def slow_tiles(self, seconds: float) -> None:
        """Every tile takes longer, after its prologue."""
        prologue = gemm_classical.prologue

        def slow(*arguments: Any) -> Any:
            obtained = prologue(*arguments)
            time.sleep(seconds)
            return obtained

        with replaced(gemm_classical, "prologue", slow):
            self.well()

    def skip_waits(self) -> None:
        """Compute every tile without waiting for it."""
        with replaced(protocol, "wait", lambda pointer, want, alive, *_: alive):
            self.well()

    def lose_publish(self, lost: int) -> None:
        """Never announce one tile."""
        epilogue = gemm_classical.epilogue

        def forgetful(tile: Any, epoch: Any, alive: Any, *rest: Any) -> None:
            epilogue(tile, epoch, alive & (int(tile) != lost), *rest)

        with replaced(gemm_classical, "epilogue", forgetful):
            self.well()

    def wait_for_abort(self) -> None:
        """Start only when a consumer has given up."""
        end = time.monotonic() + 60
        while not int(self.memory.workspace.stage(self.stages[0], "abort")) and time.monotonic() < end:
            time.sleep(0.01)
        self.well()

    def fail(self) -> None:
        raise ZeroDivisionError("one over nothing")

    def die(self) -> None:
        os._exit(3)

    def hang(self) -> None:
        time.sleep(120)
