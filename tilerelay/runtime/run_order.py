"""What a run on GPUs waits for, and what waits for a run: callers' streams on all its devices, and other pipelines."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

OUTSTANDING_RUNS = 32  # more queued launches would block the host in the middle of one

# Device -> the last run on it, of whichever pipeline. Two pipelines at once on the same devices could each fill one and
# wait for the other for ever, so runs of a process follow each other on every device.
_LAST: dict[int, tuple[RunOrder, torch.cuda.Event]] = {}


class RunOrder:
    """Orders one pipeline's runs; `before` and `after` bracket the launch of each.

    Args:
        devices: of the pipeline; runs are launched on the current stream of the first.
        finish: waits for an event of an earlier run, within the pipeline's own bounds.
    """

    def __init__(self, devices: Sequence[int], finish: Callable[[torch.cuda.Event], None]) -> None:
        self._devices, self._home, self._others = list(devices), devices[0], list(devices[1:])
        self._finish = finish
        self._before = {}
        for device in self._others:
            with torch.cuda.device(device):
                self._before[device] = torch.cuda.Event()
                self._before[device].record()  # torch makes the event at its first use
        self._done: deque[torch.cuda.Event] = deque()
        self._spare = [torch.cuda.Event() for _ in range(OUTSTANDING_RUNS)]
        self._caller = 0

    @property
    def last(self) -> torch.cuda.Event | None:
        """The end of the newest run; None before the first."""
        return self._done[-1] if self._done else None

    def before(self) -> None:
        """Make the next run wait for what callers have enqueued on any of its devices, and for the runs before it.

        It counts as latency, so nothing is enqueued that is not needed: not for a stream that is idle, nor for a run
        behind which the caller's stream is anyway.
        """
        if not self._spare:
            self._finish(self._done[0])
            self._spare.append(self._done.popleft())
        home = torch.cuda.current_stream(self._home)
        for device in self._others:
            stream = torch.cuda.current_stream(device)
            if not stream.query():
                self._before[device].record(stream)
                home.wait_event(self._before[device])
        for device in self._devices:
            owner, event = _LAST.get(device, (self, None))
            if event is not None and (owner is not self or home.cuda_stream != self._caller):
                home.wait_event(event)

    def after(self) -> None:
        """What callers enqueue next on any of the run's devices comes after the run (rule 9)."""
        home = torch.cuda.current_stream(self._home)
        self._caller = home.cuda_stream
        event = self._spare.pop()
        event.record(home)
        for device in self._others:
            torch.cuda.current_stream(device).wait_event(event)
        for device in self._devices:
            _LAST[device] = (self, event)
        self._done.append(event)
