"""A cell: one chain of GEMMs at one batch size on one number of GPUs. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from tilerelay.errors import InvalidInput


@dataclass(frozen=True, order=True)
class Cell:
    """What all methods of a measurement have in common.

    Attributes:
        gpus: number of GPUs.
        layers: number of GEMMs.
        m: rows of the batch.
        n, k: n = k for a chain of equal layers; for d -> f -> d, k = d and n = f.

    Raises:
        InvalidInput: sizes that are not positive, or more than two layers that are not square.
    """

    gpus: int
    layers: int
    m: int
    n: int
    k: int

    def __post_init__(self) -> None:
        for name in ("gpus", "layers", "m", "n", "k"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
                raise InvalidInput(f"a cell with {name}={value!r}: sizes must be positive whole numbers")
        if self.n != self.k and self.layers > 2:
            raise InvalidInput(
                f"{self.layers} layers with n={self.n}, k={self.k}: more than two layers must have n = k"
            )

    @property
    def widths(self) -> tuple[int, ...]:
        """Columns of x and of every layer's output: [layers + 1]."""
        return tuple(self.k if i % 2 == 0 else self.n for i in range(self.layers + 1))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Everything but the rows: cells that share it share weights and buffers."""
        return self.gpus, self.layers, self.n, self.k

    @property
    def flops(self) -> int:
        return sum(2 * self.m * k * n for k, n in zip(self.widths, self.widths[1:], strict=False))

    def __str__(self) -> str:
        chain = " -> ".join(str(w) for w in self.widths) if self.n != self.k else f"{self.layers} x {self.n}"
        return f"M={self.m}, {chain}, {self.gpus} GPU{'s' if self.gpus > 1 else ''}"
