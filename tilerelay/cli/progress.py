"""A progress bar for whatever takes longer than two seconds; none when the output is not a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

T = TypeVar("T")
QUIET_S = 2.0


def track(items: Iterable[T], total: int, what: str) -> Iterator[T]:
    """Yield the items; show a bar on stderr once two seconds have passed."""
    columns = TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    began = time.monotonic()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(what, total=total, visible=False)
        for item in items:
            yield item
            bar.update(task, advance=1, visible=time.monotonic() - began > QUIET_S)
