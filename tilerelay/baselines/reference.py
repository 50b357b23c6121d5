"""The fp32 reference that every method is checked against, row by row."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tilerelay.baselines.method import Piece
from tilerelay.baselines.operands import Operands

ROWS_AT_ONCE = 2048
# Rounding to bf16 moves a row of 8192 numbers by 0.0017 of its norm. A chain rounds every intermediate, and a sum over
# GPUs rounds its parts; errors add up as their squares. A single wrong tile of 256 columns shifts its rows by 0.18.
TOLERANCE_PER_LAYER = 0.006


def tolerance(layers: int) -> float:
    return TOLERANCE_PER_LAYER * math.sqrt(layers)


class Reference:
    """Y of the whole chain in fp32, without rounding in between: [rows, N] on one GPU."""

    def __init__(self, operands: Operands, gpu: int) -> None:
        weights = [operands.weight(layer, gpu).float() for layer in range(len(operands.widths) - 1)]
        blocks = []
        for block in torch.split(operands.x(gpu), ROWS_AT_ONCE):
            values = block.float()
            for weight in weights:
                values = values @ weight.t()
            blocks.append(values)
        self.y = torch.cat(blocks)

    def worst_row_error(self, pieces: Sequence[Piece]) -> float:
        """The largest ||got - wanted|| / ||wanted|| over all rows of all pieces; NaN if any element is."""
        worst = torch.zeros((), device=self.y.device)
        for piece in pieces:
            rows, columns = piece.tensor.shape
            for first in range(0, rows, ROWS_AT_ONCE):
                got = piece.tensor[first : first + ROWS_AT_ONCE].to(self.y.device).float()
                row = piece.first_row + first
                wanted = self.y[row : row + len(got), piece.first_column : piece.first_column + columns]
                errors = (got - wanted).norm(dim=1) / wanted.norm(dim=1)
                worst = torch.maximum(worst, errors.max())  # both propagate NaN
        return float(worst)


def covers(pieces: Sequence[Piece], rows: int, columns: int) -> bool:
    """Whether the pieces together hold every element of a [rows, columns] result."""
    boxes = [
        (p.first_row, p.first_row + p.tensor.shape[0], p.first_column, p.first_column + p.tensor.shape[1])
        for p in pieces
    ]
    row_cuts = sorted({0, rows} | {edge for box in boxes for edge in box[:2] if edge < rows})
    column_cuts = sorted({0, columns} | {edge for box in boxes for edge in box[2:] if edge < columns})
    return all(
        any(top <= row < bottom and left <= column < right for top, bottom, left, right in boxes)
        for row in row_cuts[:-1]
        for column in column_cuts[:-1]
    )
