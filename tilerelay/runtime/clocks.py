"""The GPUs' clocks against each other: what to take off a device's time stamps to have them on another one's clock.

Each GPU counts nanoseconds on its own (`globaltimer`); two of them differ by microseconds and drift apart. Two kernels
play ping-pong over peer memory: a word goes from the reference device, stamped when it is sent (t0), to the other one,
stamped when it arrives (p), and back, stamped again (t1). Since p was read between t0 and t1, the offset of the other
clock lies in [p - t1, p - t0], whatever the two ways took; over a burst of exchanges these intervals have a common
part, usually half a round trip wide on each side. Its middle is the estimate, its half width a bound of the error.
The burst is played before and after a run, and the offset in between interpolated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tilerelay.errors import UnsupportedMachine
from tilerelay.kernels.ping import ping, pong
from tilerelay.runtime import cuda

EXCHANGES = 200  # half a millisecond: the clocks do not drift by anything that shows
POLLS = 1 << 22  # of local memory: seconds; then whoever waits gives up for good


@dataclass(frozen=True)
class Reading:
    """One burst between the reference device and another one; nanoseconds.

    Attributes:
        at: when, on the other device's clock.
        offset: the other device's clock less the reference's.
        error: the offset is known to within this.
        round_trip: the shortest one.
        granularity: the smallest step of the two clocks.
    """

    at: float
    offset: float
    error: float
    round_trip: int
    granularity: int


def reading(sent: NDArray[np.int64], arrived: NDArray[np.int64], answered: NDArray[np.int64]) -> Reading:
    """The offset from a burst's stamps, [exchanges] each.

    Raises:
        UnsupportedMachine: words that never came, or a clock that jumped.
    """
    lost = int(((arrived == 0) | (answered == 0)).sum())
    if lost:
        raise UnsupportedMachine(
            f"{lost} of {len(sent)} words between two devices did not arrive; their clocks cannot be compared"
        )
    granularity = int(np.gcd.reduce(np.abs(np.concatenate([np.diff(t) for t in (sent, arrived, answered)])))) or 1
    # A stamp is up to a granule older than the moment at which it was read.
    low = int((arrived - answered).max()) - granularity
    high = int((arrived - sent).min()) + granularity
    if low > high:
        raise UnsupportedMachine(f"a device's clock jumped by more than {low - high} ns while it was read; try again")
    middle = float(arrived[len(arrived) // 2])
    return Reading(middle, (low + high) / 2, (high - low) / 2, int((answered - sent).min()), granularity)


class Alignment:
    """Offsets of devices before and after a run, by device, and what lies between."""

    def __init__(self, reference: int, before: Mapping[int, Reading], after: Mapping[int, Reading]) -> None:
        self.reference, self._before, self._after = reference, before, after

    def offset(self, device: int, times: NDArray[Any]) -> NDArray[np.float64]:
        """What to take off a device's time stamps."""
        if device == self.reference:
            return np.zeros(times.shape)
        a, b = self._before[device], self._after[device]
        return np.asarray(a.offset + (times - a.at) / max(1.0, b.at - a.at) * (b.offset - a.offset))

    def error(self) -> float:
        """Bound, in ns, of the error between any two devices.

        Before and after, each offset is known to within its own error; in between, the clocks may have drifted
        unevenly, by no more than they did in all. Two devices that are not the reference have both errors.
        """
        errors = sorted(
            (max(a.error, b.error) + abs(a.offset - b.offset) for a, b in self._pairs()),
            reverse=True,
        )
        return sum(errors[:2])

    def to_json(self) -> dict[str, dict[str, float]]:
        """By device: offset, drift from before to after, and the shortest round trip, in ns."""
        return {
            str(d): {
                "offset_ns": a.offset,
                "drift_ns": self._after[d].offset - a.offset,
                "error_ns": max(a.error, self._after[d].error),
                "round_trip_ns": min(a.round_trip, self._after[d].round_trip),
            }
            for d, a in self._before.items()
        }

    def _pairs(self) -> list[tuple[Reading, Reading]]:
        return [(a, self._after[d]) for d, a in self._before.items()]


class Clocks:
    """Reads the clocks of GPUs against the first one's. Its kernels are loaded when it is made.

    Raises:
        UnsupportedMachine: the devices cannot write each other's memory.
    """

    def __init__(self, devices: Sequence[int]) -> None:
        self.reference = devices[0]
        cuda.open_peers(devices)
        self._pairs = {device: _Pair(self.reference, device) for device in devices[1:]}

    def read(self) -> dict[int, Reading]:
        """One burst with every device. The devices must be idle, or the bursts wait for them.

        Raises:
            UnsupportedMachine: as `reading`.
        """
        return {device: pair.read() for device, pair in self._pairs.items()}


class _Pair:
    """Words, stamps and streams of two devices."""

    def __init__(self, reference: int, other: int) -> None:
        self._words = [_zeros(1, torch.int32, device) for device in (reference, other)]
        self._sent, self._answered = (_zeros(EXCHANGES, torch.int64, reference) for _ in range(2))
        self._arrived = _zeros(EXCHANGES, torch.int64, other)
        self._streams = [torch.cuda.Stream(device) for device in (reference, other)]
        # Alone first, with nothing to wait for: no kernel may be compiled or loaded while the other side polls.
        for side in range(2):
            self._fill_words(EXCHANGES)
            self._launch(side)
            self._synchronize()

    def read(self) -> Reading:
        self._fill_words(0)
        for side in range(2):
            self._launch(side)
        self._synchronize()
        return reading(*(t.cpu().numpy() for t in (self._sent, self._arrived, self._answered)))

    def _launch(self, side: int) -> None:
        mine, theirs = self._words[side], self._words[1 - side]
        with cuda.on(self._streams[side]):
            if side == 0:
                ping[(1,)](mine, theirs, self._sent, self._answered, EXCHANGES, POLLS, num_warps=1)
            else:
                pong[(1,)](mine, theirs, self._arrived, EXCHANGES, POLLS, num_warps=1)

    def _fill_words(self, value: int) -> None:
        for word in self._words:
            word.fill_(value)
        self._synchronize()

    def _synchronize(self) -> None:
        for stream in self._streams:
            torch.cuda.synchronize(stream.device)


def _zeros(count: int, dtype: torch.dtype, device: int) -> torch.Tensor:
    return torch.zeros(count, dtype=dtype, device=f"cuda:{device}")
