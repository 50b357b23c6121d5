"""Classical GEMM: one tile per CTA, all threads follow the same flow (paper, section III.B.1), in Triton.

`c[M, N] = activation(a[M, K] @ b[N, K].T + bias[N])`, fp32 accumulation. Prologue first, epilogue last; between them
nothing knows of the protocol. Rows and columns past the edge are clipped by the tensor descriptors.
"""

import triton
import triton.language as tl

from tilerelay.kernels.activation import activate
from tilerelay.kernels.conversion import narrow, widen
from tilerelay.kernels.protocol import COMPUTED, EVENTS, epilogue, leave, prologue
from tilerelay.kernels.sync import INTERPRETED, load_uniform, stamp

UNSPECIALISED = [
    "stage", "words", "timeout_us", "tiles", "tiles_n", "k_tiles", "n",
    "in_entries", "in_mask", "in_group", "out_mask", "out_group",
]  # fmt: skip


@triton.jit(do_not_specialize=UNSPECIALISED)
def gemm_classical(
    a_desc, b_desc, c_desc, bias, control, inbox, outbox,
    stage, words, timeout_us, tiles, tiles_n, k_tiles, n, in_entries, in_mask, in_group, out_mask, out_group,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SOURCE: tl.constexpr, SIGNAL: tl.constexpr, GROUP_ENTRIES: tl.constexpr, STRIDE: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    epoch = tl.load(control.epoch)
    alive = load_uniform(control.abort) == 0
    tile, alive = prologue(
        tl.program_id(0), alive, epoch, control, inbox, words, timeout_us, stage, in_entries, in_mask, in_group, SOURCE, STRIDE
    )  # fmt: skip
    row = tile // tiles_n * BLOCK_M
    col = tile % tiles_n * BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(k_tiles):
        a = a_desc.load([row, k * BLOCK_K])
        b = b_desc.load([col, k * BLOCK_K])
        if INTERPRETED:  # its bf16 products are wrong
            acc = tl.dot(widen(a), widen(b).T, acc)
        else:
            acc = tl.dot(a, b.T, acc)
    stamp(control.stamps, tile, COMPUTED, EVENTS)
    if HAS_BIAS:
        columns = col + tl.arange(0, BLOCK_N)
        acc += widen(tl.load(bias + columns, mask=columns < n, other=0.0))[None, :]
    c_desc.store([row, col], narrow(activate(acc, ACTIVATION), c_desc.dtype))
    epilogue(tile, epoch, alive, tl.arange(0, 32), control, outbox, out_mask, out_group, SIGNAL, GROUP_ENTRIES, STRIDE)
    leave(control, epoch)
