"""Waiting for the GPU with a deadline: a method that hangs must not take the whole run with it."""

from __future__ import annotations

import time
from collections.abc import Callable


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
