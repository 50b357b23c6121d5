"""Waiting for the GPU with a deadline: a method that hangs must not take the whole run with it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

LIMIT_S = 30.0  # for one run of a method: the longest takes some 30 ms, and our own waits give up after 10 s


class Stuck(RuntimeError):
    """The GPU did not finish in time. Nothing in this process can end its work; the process has to go."""


def wait_until(
    done: Callable[[], bool], limit_s: float, what: str, *, clock: Callable[[], float] = time.monotonic
) -> None:
    """Poll until done.

    Raises:
        Stuck: `limit_s` seconds have passed.
    """
    end = clock() + limit_s
    while not done():
        if clock() > end:
            raise Stuck(f"{what} did not finish within {limit_s:.0f} s")


def drain(streams: Iterable[Any], what: str = "what was enqueued") -> None:
    """Wait for all work on the streams.

    Raises:
        Stuck: some of it never came to an end.
    """
    for stream in streams:
        wait_until(stream.query, LIMIT_S, what)
