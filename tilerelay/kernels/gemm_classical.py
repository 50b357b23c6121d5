"""Classical GEMM: one tile per CTA, all threads follow the same flow (paper, section III.B.1), in Triton.

`c[M, N] = activation(a[M, K] @ b[N, K].T + bias[N])`, fp32 accumulation. Prologue first, epilogue last; between them
nothing knows of the protocol. Rows and columns past the edge are clipped by the tensor descriptors.
"""

import triton
import triton.language as tl

from tilerelay.kernels.activation import activate
from tilerelay.kernels.conversion import narrow, widen
from tilerelay.kernels.protocol import COMPUTED, EVENTS, epilogue, leave, load_numbers, prologue
from tilerelay.kernels.sync import INTERPRETED, load_uniform, stamp


@triton.jit
def compute_tile(
    a_desc, b_desc, c_descs, segment, words, timeout_us,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    HOOKS: tl.constexpr, STRIDE: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """The kernel's body; its entry points (kernels.entry) only differ in how many copies of the output they take."""
    control = segment.control
    numbers = load_numbers(control)
    epoch = tl.load(control.epoch)
    alive = load_uniform(control.abort) == 0
    ticket = tl.program_id(0)
    tile, alive = prologue(ticket, alive, epoch, segment, numbers, words, timeout_us, HOOKS.source, STRIDE)
    row = tile // numbers.tiles_n * BLOCK_M
    col = tile % numbers.tiles_n * BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(tl.cdiv(numbers.k, BLOCK_K)):
        a = a_desc.load([row, k * BLOCK_K])
        b = b_desc.load([col, k * BLOCK_K])
        if INTERPRETED:  # its bf16 products are wrong; those in fp64 are exact, so that no order of a sum shows
            product = tl.dot(widen(a).to(tl.float64), widen(b).to(tl.float64).T, out_dtype=tl.float64)
            acc += product.to(tl.float32)
        else:
            acc = tl.dot(a, b.T, acc)
    stamp(control.stamps, tile, COMPUTED, EVENTS)
    if segment.bias is not None:
        columns = col + tl.arange(0, BLOCK_N)
        acc += widen(tl.load(segment.bias + columns, mask=columns < numbers.n, other=0.0))[None, :]
    c = narrow(activate(acc, ACTIVATION), a_desc.dtype)
    COPIES: tl.constexpr = HOOKS.copies
    for copy in tl.static_range(COPIES):
        c_descs[copy].store([row, col], c)
    READERS: tl.constexpr = HOOKS.readers
    epilogue(tile, epoch, alive, tl.arange(0, 32), segment, numbers, 0, READERS, HOOKS, STRIDE)
    leave(control, epoch)
