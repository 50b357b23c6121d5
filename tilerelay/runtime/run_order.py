"""What a run on GPUs waits for, and what waits for a run: callers' streams on all its devices, and other pipelines."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import cache

import torch

OUTSTANDING_RUNS = 32  # more queued launches would block the host in the middle of one

# Device -> the last run on it, of whichever pipeline. Two pipelines at once on the same devices could each fill one and
# wait for the other for ever, so runs of a process follow each other on every device.
_LAST: dict[int, tuple[RunOrder, torch.cuda.Event]] = {}


@cache
def _stream(stream_id: int, device: int, device_type: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(stream_id=stream_id, device_index=device, device_type=device_type)


def current_stream(device: int) -> torch.cuda.Stream:
    """As torch.cuda.current_stream, the same object each time and with nothing else: a launch waits for it."""
    return _stream(*torch._C._cuda_getCurrentStream(device))


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
        self._caller: torch.cuda.Stream | None = None

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
        home = current_stream(self._home)
        for device in self._others:
            stream = current_stream(device)
            if not stream.query():
                self._before[device].record(stream)
                home.wait_event(self._before[device])
        for device in self._devices:
            last = _LAST.get(device)
            if last is not None and (last[0] is not self or home is not self._caller):
                home.wait_event(last[1])

    def after(self) -> None:
        """What callers enqueue next on any of the run's devices comes after the run (rule 9)."""
        home = self._caller = current_stream(self._home)
        event = self._spare.pop()
        event.record(home)
        for device in self._others:
            current_stream(device).wait_event(event)
        for device in self._devices:
            _LAST[device] = (self, event)
        self._done.append(event)
