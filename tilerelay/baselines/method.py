"""What a method is: how it states itself, its variants, and the launches made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from tilerelay.baselines.cell import Cell

if TYPE_CHECKING:
    from tilerelay.baselines.lanes import Lanes
    from tilerelay.baselines.operands import Operands
    from tilerelay.baselines.rank_ops import RankOps


@dataclass(frozen=True)
class Lives:
    """Where a method finds X, leaves Y, and what more than one GPU holds."""

    x: str
    y: str
    replicated: str = "nothing"


@dataclass(frozen=True)
class Piece:
    """A part of Y that a variant leaves: `tensor` holds Y from (first_row, first_column) on."""

    tensor: torch.Tensor
    first_row: int = 0
    first_column: int = 0


class Launch(Protocol):
    """Something that can be enqueued again and again: a CUDA graph, or a body that is enqueued eagerly."""

    def replay(self) -> None:
        """Enqueue once, behind the current work of the first GPU's main stream and visible to it at the end."""

    def finish(self) -> None:
        """Called when the replay is done. Raises what went wrong in it, if the method can tell."""

    def close(self) -> None:
        """Free what the launch owns."""


class OwnLaunch(Launch, Protocol):
    """A launch that brings its own graph and its own Y."""

    def pieces(self) -> Sequence[Piece]: ...

    def poison(self) -> Sequence[torch.Tensor]: ...


@dataclass
class Variant:
    """One way to run a method: a chunk size, a cut.

    Attributes:
        label: what distinguishes it within the method.
        enqueue: enqueues the work once; this is what gets captured.
        pieces: the parts of Y that it leaves, asked for after a capture or a run.
        poison: tensors to fill with NaN before the check, so that what is not written shows.
        chunk: rows per chunk, for methods that cut the batch.
        compute_only: the method's work without its communication: timed for the breakdown, never a candidate.
        checked: False for work whose result means nothing (the floor's independent GEMMs).
        launcher: for methods that bring their own graph: makes the launch ("graph" or "eager") in place of a capture;
            its pieces and poison count then, and enqueue is not used.
        note: what a reader of the figure must know.
    """

    label: str
    enqueue: Callable[[], None]
    pieces: Callable[[], Sequence[Piece]]
    poison: Sequence[torch.Tensor] = ()
    chunk: int | None = None
    compute_only: bool = False
    checked: bool = True
    launcher: Callable[[str], OwnLaunch] | None = None
    note: str | None = None


class Method(Protocol):
    """A method of the one-process set: one process drives all GPUs, one CUDA graph spans them."""

    name: str
    lives: Lives

    def refusal(self, cell: Cell) -> str | None:
        """Why the method makes no sense on this cell; None: it does."""

    def variants(self, cell: Cell, operands: Operands, lanes: Lanes) -> list[Variant]:
        """Allocates everything; after this, enqueueing allocates nothing."""


class RankMethod(Protocol):
    """A method of the torchrun set: a process and a CUDA graph per GPU; every rank makes its own part."""

    name: str
    lives: Lives

    def refusal(self, cell: Cell) -> str | None: ...

    def variants(self, cell: Cell, operands: Operands, ops: RankOps) -> list[Variant]: ...


CHUNKS = (256, 512, 1024, 2048, 4096)
MOST_CHUNKS = 32


def chunk_sizes(m: int) -> list[int]:
    """The chunk sizes of every sweep over m rows: at least two chunks, at most 32."""
    return [size for size in CHUNKS if size < m and -(-m // size) <= MOST_CHUNKS]


def row_chunks(m: int, size: int) -> list[slice]:
    return [slice(first, min(first + size, m)) for first in range(0, m, size)]


def refuse_unless(*rules: tuple[bool, str]) -> str | None:
    """The text of the first rule that does not hold."""
    return next((text for holds, text in rules if not holds), None)


def several_gpus(cell: Cell) -> tuple[bool, str]:
    return cell.gpus > 1, "needs two GPUs or more"


def even_layers(cell: Cell) -> tuple[bool, str]:
    return cell.layers % 2 == 0, f"cuts layers in pairs; {cell.layers} is odd"


def layers_fill_gpus(cell: Cell) -> tuple[bool, str]:
    return (
        cell.layers % cell.gpus == 0,
        f"puts whole layers on GPUs; {cell.layers} layers do not fill {cell.gpus} GPUs evenly",
    )


def rows_divide(cell: Cell) -> tuple[bool, str]:
    return cell.m % cell.gpus == 0, f"cuts the batch by rows; {cell.m} rows do not divide over {cell.gpus} GPUs"


def columns_divide(cell: Cell) -> tuple[bool, str]:
    return all(
        w % cell.gpus == 0 for w in cell.widths
    ), f"cuts weights evenly; {cell.n} x {cell.k} does not divide over {cell.gpus} GPUs"
