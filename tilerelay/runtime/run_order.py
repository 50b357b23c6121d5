"""What a run on GPUs waits for, and what waits for a run: callers' streams on all its devices, and other pipelines."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilerelay.errors import InvalidInput

OUTSTANDING_RUNS = 32  # more queued launches would block the host in the middle of one

# Device -> the last run on it, of whichever pipeline. Two pipelines at once on the same devices could each fill one and
# wait for the other for ever, so runs of a process follow each other on every device.
_LAST: dict[int, tuple[RunOrder, torch.cuda.Event]] = {}
_TURN = threading.Lock()  # one launch at a time, whichever thread's and pipeline's

# Device -> its current stream, a number. A CPU build of torch has none.
raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class RunOrder:
    """Orders one pipeline's runs.

    Attributes:
        runs: how many were launched; for the owner to set back.

    Args:
        devices: of the pipeline; runs are launched on the current stream of the first.
        finish: the pipeline's method that waits for an event of an earlier run, within the pipeline's own bounds. The
            pipeline is not kept alive by it.
    """

    def __init__(self, devices: Sequence[int], finish: Callable[[torch.cuda.Event], None]) -> None:
        self._devices, self._home, self._others = list(devices), devices[0], list(devices[1:])
        self._finish = weakref.WeakMethod(finish)
        self.runs = 0
        self._before = {}
        for device in self._others:
            with torch.cuda.device(device):
                self._before[device] = torch.cuda.Event()
                self._before[device].record()  # torch makes the event at its first use
        self._done: deque[torch.cuda.Event] = deque()
        self._spare = [torch.cuda.Event() for _ in range(OUTSTANDING_RUNS)]
        # Of its last run: whether it is the last on all its devices, and its stream.
        self._newest, self._caller = False, -1
        # Of its last run on all streams: those of the other devices, and what tells whether they are idle.
        self._seen: list[tuple[int, int, Callable[[], bool]]] = []

    @property
    def last(self) -> torch.cuda.Event | None:
        """The end of the newest run; None before the first."""
        return self._done[-1] if self._done else None

    def run(self, launch: Callable[[], None], all_streams: bool = True) -> None:
        """Launch a run behind the runs before it and behind what callers have enqueued on the current streams of its
        devices; what they enqueue there next comes after the run (rule 9).

        What comes before the launch counts as latency, and after a rest, with cold caches, every Python call takes
        microseconds, a look at another device's stream ten and more. So the usual case comes first, without a call to
        another function here: all streams are those of the last run, the other devices' idle.

        Args:
            all_streams: False: order it on the first device's stream alone.
        """
        with _TURN:
            if not self._spare:
                self._reclaim()
            usual = self._newest and raw_stream(self._home) == self._caller
            if all_streams:
                usual = usual and bool(self._seen or not self._others)
                for device, stream, idle in self._seen:
                    usual = usual and raw_stream(device) == stream and idle()
            if not usual:
                self._wait(self._others if all_streams else ())
            launch()
            self.runs += 1
            self._follow(self._others if all_streams else ())

    def _reclaim(self) -> None:
        """Wait for the oldest run, whose event the next one takes."""
        finish = self._finish()
        assert finish is not None, "only the pipeline runs"
        finish(self._done[0])
        self._spare.append(self._done.popleft())

    def _wait(self, others: Sequence[int]) -> None:
        """Make the home's stream wait for the other devices' streams and for earlier runs.

        Nothing is enqueued for a stream that is idle, nor for a run behind which the home's stream is anyway.
        """
        home = torch.cuda.current_stream(self._home)
        with torch.cuda.stream(home):
            if torch.cuda.is_current_stream_capturing():
                raise InvalidInput("a pipeline cannot be run in a capture of your own; use its capture(x)")
        for device in others:
            stream = torch.cuda.current_stream(device)
            if not stream.query():
                self._before[device].record(stream)
                home.wait_event(self._before[device])
        for device in self._devices:
            last = _LAST.get(device)
            if last is not None and (last[0] is not self or home.cuda_stream != self._caller):
                home.wait_event(last[1])

    def _follow(self, others: Sequence[int]) -> None:
        """What callers enqueue next comes after the run."""
        home = torch.cuda.current_stream(self._home)
        event = self._spare.pop()
        event.record(home)
        self._done.append(event)
        for device in self._devices:
            if device in _LAST:
                _LAST[device][0]._newest = False
            _LAST[device] = (self, event)
        self._newest, self._caller = True, home.cuda_stream
        if others:
            streams = [torch.cuda.current_stream(device) for device in others]
            for stream in streams:
                stream.wait_event(event)
            self._seen = [(stream.device_index, stream.cuda_stream, stream.query) for stream in streams]
