"""Entry points of the kernels: one for every number of segments and of copies of their outputs.

Triton takes tensor descriptors as plain arguments only, not inside tuples, so an entry point names each of them and
hands the body tuples. The entry points' texts differ in nothing but these names, and are made here.
"""

from __future__ import annotations

import linecache
from functools import cache
from typing import Any

import triton
from triton.experimental import gluon

from tilerelay.kernels import gemm_classical, gemm_persistent

UNSPECIALISED = ["words", "timeout_us"]
_PERSISTENT = """\
def {name}(
    {descriptors}, segments, words, timeout_us,
    HOOKS: gl.constexpr, ACTIVATIONS: gl.constexpr, STRIDE: gl.constexpr,
    NUM_BUFFERS: gl.constexpr, STORE_BUFFERS: gl.constexpr, GROUPS: gl.constexpr,
):
    walk_segments(
        ({a},), ({b},), ({c},), segments, words, timeout_us,
        HOOKS, ACTIVATIONS, STRIDE, NUM_BUFFERS, STORE_BUFFERS, GROUPS, {segments},
    )
"""
_CLASSICAL = """\
def {name}(
    {descriptors}, segments, words, timeout_us,
    HOOKS: tl.constexpr, ACTIVATION: tl.constexpr, STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    compute_tile(
        {a}, {b}, {c}, segments[0], words, timeout_us,
        BLOCK_M, BLOCK_N, BLOCK_K, HOOKS, STRIDE, ACTIVATION,
    )
"""


@cache
def entry(kind: str, copies: tuple[int, ...]) -> Any:
    """The kernel for len(copies) segments, segment s storing its output in copies[s] places.

    It takes, for each segment in turn, the descriptors of A, of B, and of each copy of the output.
    """
    outputs = [[f"c{s}_{i}" for i in range(count)] for s, count in enumerate(copies)]
    name = f"gemm_{kind}_{'_'.join(map(str, copies))}"
    module, text = (gemm_persistent, _PERSISTENT) if kind == "persistent" else (gemm_classical, _CLASSICAL)
    text = text.format(
        name=name,
        descriptors=", ".join(", ".join([f"a{s}", f"b{s}", *out]) for s, out in enumerate(outputs)),
        a=", ".join(f"a{s}" for s in range(len(copies))),
        b=", ".join(f"b{s}" for s in range(len(copies))),
        c=", ".join(f"({', '.join(out)},)" for out in outputs),
        segments=len(copies),
    )
    # Triton reads a kernel's text through `inspect`, which asks linecache.
    file = f"<tilerelay {name}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    names: dict[str, Any] = {}
    exec(compile(text, file, "exec"), vars(module), names)
    jit = gluon.jit if kind == "persistent" else triton.jit
    return jit(names[name], do_not_specialize=UNSPECIALISED)
