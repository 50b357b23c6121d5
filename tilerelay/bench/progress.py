"""A progress bar on a terminal; one plain line per cell elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from tilerelay.baselines.cell import Cell


class Progress(Protocol):
    def event(self, cell: Cell, event: dict[str, Any]) -> None: ...

    def finished(self, cell: Cell) -> None: ...

    def say(self, line: str) -> None: ...


class PlainProgress:
    """Lines on standard error."""

    def __init__(self, cells: int) -> None:
        self._cells, self._done = cells, 0

    def event(self, cell: Cell, event: dict[str, Any]) -> None:
        pass

    def finished(self, cell: Cell) -> None:
        self._done += 1
        self.say(f"[{self._done}/{self._cells}] {cell}")

    def say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)


class BarProgress:
    """rich's bar: one step per cell, with the method that is being prepared or the round that is being timed."""

    def __init__(self, bar: Any, cells: int) -> None:
        self._bar = bar
        self._task = bar.add_task("starting", total=float(cells))
        self._done = 0

    def event(self, cell: Cell, event: dict[str, Any]) -> None:
        if event["event"] == "round":
            share = event["done"] / event["of"]
            text = f"{cell}: round {event['done']} of {event['of']}"
            self._bar.update(self._task, completed=self._done + share, description=text)
        elif event["event"] == "try" and self._bar.tasks[0].completed <= self._done:
            self._bar.update(self._task, description=f"{cell}: {event['method']}")

    def finished(self, cell: Cell) -> None:
        self._done += 1
        self._bar.update(self._task, completed=float(self._done))

    def say(self, line: str) -> None:
        self._bar.console.print(line, markup=False, highlight=False)


@contextmanager
def progress(cells: int) -> Iterator[Progress]:
    """The kind that suits standard error.

    Args:
        cells: cells to measure, over all process sets.
    """
    if not sys.stderr.isatty():
        yield PlainProgress(cells)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True)) as bar:
        yield BarProgress(bar, cells)
