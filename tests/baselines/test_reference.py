"""The check itself: what it must catch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tilerelay.baselines.cell import Cell
from tilerelay.baselines.method import Piece, chunk_sizes, row_chunks
from tilerelay.baselines.reference import Reference, covers, tolerance
from tilerelay.errors import InvalidInput


def test_bf16_rounding_passes_and_one_wrong_tile_does_not(cpu_operands: Any) -> None:
    operands = cpu_operands(1, (256, 2048, 256), 16)
    reference = Reference(operands, 0)
    hidden = (operands.x(0).bfloat16().float() @ operands.weight(0, 0).t()).bfloat16().float()
    y = (hidden @ operands.weight(1, 0).t()).bfloat16()
    assert 1e-4 < reference.worst_row_error([Piece(y)]) < tolerance(2)
    y[3, 8:16] = y[4, 8:16]
    assert reference.worst_row_error([Piece(y)]) > tolerance(2)


def test_nan_anywhere_is_never_right(cpu_operands: Any) -> None:
    operands = cpu_operands(1, (16, 16), 8)
    y = Reference(operands, 0).y.clone()
    y[7, 15] = float("nan")
    assert math.isnan(Reference(operands, 0).worst_row_error([Piece(y[:4]), Piece(y[4:], first_row=4)]))


def test_pieces_are_compared_where_they_belong(cpu_operands: Any) -> None:
    reference = Reference(cpu_operands(1, (16, 16), 8), 0)
    right = [Piece(reference.y[2:6, 4:8], first_row=2, first_column=4)]
    assert reference.worst_row_error(right) == 0
    assert reference.worst_row_error([Piece(reference.y[2:6, 4:8], first_row=3, first_column=4)]) > 0.1


@pytest.mark.parametrize(
    ("boxes", "whole"),
    [
        ([(0, 8, 0, 4)], True),
        ([(0, 4, 0, 4), (4, 8, 0, 4)], True),
        ([(0, 8, 0, 2), (0, 8, 2, 4)], True),
        ([(0, 8, 0, 4), (0, 8, 0, 4)], True),
        ([(0, 7, 0, 4)], False),
        ([(0, 4, 0, 4), (5, 8, 0, 4)], False),
        ([(0, 8, 0, 2)], False),
        ([], False),
    ],
)
def test_covers(boxes: list[tuple[int, int, int, int]], whole: bool) -> None:
    pieces = [Piece(torch.empty(b - t, r - left), t, left) for t, b, left, r in boxes]
    assert covers(pieces, 8, 4) is whole


def test_chunk_sweep_is_bounded() -> None:
    assert chunk_sizes(1024) == [256, 512]
    assert chunk_sizes(8192) == [256, 512, 1024, 2048, 4096]
    assert chunk_sizes(32768) == [1024, 2048, 4096]
    assert chunk_sizes(256) == []
    assert row_chunks(24, 10) == [slice(0, 10), slice(10, 20), slice(20, 24)]


def test_cells() -> None:
    assert Cell(2, 2, 64, 28672, 8192).widths == (8192, 28672, 8192)
    assert Cell(4, 4, 64, 16, 16).widths == (16,) * 5
    assert Cell(2, 2, 64, 32, 16).flops == 2 * 2 * 64 * 32 * 16
    for bad in ((0, 2, 1, 1, 1), (2, 2, -1, 1, 1), (2, 3, 1, 2, 1), (2, 2, True, 1, 1), (2, 2, 1.5, 1, 1)):
        with pytest.raises(InvalidInput):
            Cell(*bad)  # type: ignore[arg-type]
