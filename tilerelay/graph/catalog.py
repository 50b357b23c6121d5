"""Workloads by name: chains of equal layers and the MLPs of well-known models."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from tilerelay.errors import InvalidInput
from tilerelay.graph.tiling import TileGrid
from tilerelay.graph.workload import Stage, Workload, chain

# (hidden size, intermediate size) of the models' public configurations; one weight per layer (no gate).
MLP_SHAPES = {
    "paper": (8192, 8192),
    "gpt3-175b": (12288, 49152),
    "opt-66b": (9216, 36864),
    "llama-2-70b": (8192, 28672),
    "llama-3-8b": (4096, 14336),
    "llama-3-70b": (8192, 28672),
    "llama-3-405b": (16384, 53248),
    "mistral-7b": (4096, 14336),
    "qwen2.5-72b": (8192, 29568),
}


def dense_chain(
    m: int,
    widths: Sequence[int],
    *,
    dtype: str = "bf16",
    tile: tuple[int, int] = (128, 256),
    activation: str = "none",
    bias: bool = False,
    grouped: bool = True,
) -> Workload:
    """`x[m, widths[0]]` through len(widths) - 1 dense layers; the activation follows every layer but the last.

    Raises:
        InvalidInput: fewer than two widths, or sizes that are not positive.
    """
    if len(widths) < 2:
        raise InvalidInput(f"widths={list(widths)}: give at least two, the input's and the output's")
    last = len(widths) - 2
    stages = [
        Stage(f"layer{i}", TileGrid(m, n, *tile), k, activation=activation if i < last else "none", bias=bias)
        for i, (k, n) in enumerate(pairwise(widths))
    ]
    return chain(stages, dtype=dtype, grouped=grouped)


def gemm_chain(layers: int, m: int, n: int, k: int, **options: object) -> Workload:
    """The paper's workload: `x[m, k]`, a weight [n, k], then layers - 1 weights [n, n]; options as in `dense_chain`."""
    if layers < 1:
        raise InvalidInput(f"layers={layers}: a chain needs at least one")
    return dense_chain(m, [k] + [n] * layers, **options)  # type: ignore[arg-type]


def mlp(model: str, m: int, **options: object) -> Workload:
    """Two dense layers d -> f -> d with the shape of a model's MLP, without its gate; options as in `dense_chain`.

    Raises:
        InvalidInput: unknown model.
    """
    if model not in MLP_SHAPES:
        raise InvalidInput(f"unknown model {model!r}; choose one of {', '.join(MLP_SHAPES)}")
    hidden, intermediate = MLP_SHAPES[model]
    return dense_chain(m, [hidden, intermediate, hidden], **options)  # type: ignore[arg-type]
