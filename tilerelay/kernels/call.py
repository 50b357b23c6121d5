"""One call of a GEMM kernel: the function and all its arguments, the same for launching it and for compiling it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as SwizzledDescriptor
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from tilerelay.kernels.config import KernelConfig
from tilerelay.kernels.entry import entry
from tilerelay.kernels.protocol import Hooks, Segment
from tilerelay.kernels.relay import RELAY

GL_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


class Piece(NamedTuple):
    """One segment of a call: its tensors, its hooks, and what the kernel is handed of the protocol.

    Attributes:
        a, b: [M, K], [N, K].
        copies: [M, N], everywhere that the output is stored; may be memory of peers, and columns of wider tensors.
            Where tiles are relayed: of tensors of one width, the last one on the kernel's device.
        activation: one of kernels.activation.CODES.
    """

    a: torch.Tensor
    b: torch.Tensor
    copies: tuple[torch.Tensor, ...]
    segment: Segment
    hooks: Hooks
    activation: int


def gemm_call(
    config: KernelConfig, pieces: Sequence[Piece], *, words: int, timeout_us: int, stride: int
) -> tuple[JITFunction, tuple[Any, ...], dict[str, Any]]:
    """The kernel, its positional and its keyword arguments.

    Args:
        pieces: the segments that the kernel walks over; a classical kernel takes one.
        words: entries in the table of abort and wake words.
        timeout_us: deadline of every wait, microseconds.
        stride: int32 words between counters.
    """
    rows = config.block_m // config.warpgroups
    blocks = [rows, config.block_k], [config.block_n, config.block_k]
    out = [rows, config.store_n if config.kind == "persistent" else config.block_n]
    describe = _swizzled if config.kind == "persistent" else TensorDescriptor.from_tensor
    descriptors = [
        describe(tensor, block)
        for piece in pieces
        for tensor, block in [(piece.a, blocks[0]), (piece.b, blocks[1]), *((c, out) for c in _stored_in_bulk(piece))]
    ]
    options: dict[str, Any] = {"STRIDE": stride, "num_warps": config.num_warps}
    if config.kind == "persistent":
        options |= {"NUM_BUFFERS": config.num_buffers, "STORE_BUFFERS": config.store_buffers}
        options["GROUPS"] = config.warpgroups
        options["HOOKS"] = tuple(tl.constexpr(piece.hooks) for piece in pieces)
        options["ACTIVATIONS"] = tuple(tl.constexpr(piece.activation) for piece in pieces)
    else:
        options |= {"HOOKS": pieces[0].hooks, "ACTIVATION": pieces[0].activation}
        options |= {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k}
        options |= {"num_stages": config.num_buffers}
    kernel = entry(config.kind, tuple(len(_stored_in_bulk(piece)) for piece in pieces))
    return kernel, (*descriptors, tuple(piece.segment for piece in pieces), words, timeout_us), options


def _stored_in_bulk(piece: Piece) -> tuple[torch.Tensor, ...]:
    """The copies that are stored in bulk, through descriptors."""
    return piece.copies[-1:] if piece.hooks.way == RELAY.value else piece.copies


def _swizzled(tensor: torch.Tensor, block: list[int]) -> SwizzledDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for(block, GL_DTYPES[tensor.dtype])
    return SwizzledDescriptor.from_tensor(tensor, block, layout)
