"""One call of a GEMM kernel: the function and all its arguments, the same for launching it and for compiling it."""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as SwizzledDescriptor
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from tilerelay.kernels.config import KernelConfig
from tilerelay.kernels.gemm_classical import gemm_classical
from tilerelay.kernels.gemm_persistent import gemm_persistent

GL_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def gemm_call(
    config: KernelConfig,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    bias: torch.Tensor | None,
    arguments: dict[str, Any],
) -> tuple[JITFunction, tuple[Any, ...], dict[str, Any]]:
    """The kernel, its positional and its keyword arguments, for `c = activation(a @ b.T + bias)`.

    Args:
        a, b, c: [M, K], [N, K], [M, N].
        bias: [N] or None.
        arguments: what the kernel is handed but tensors, blocks and `k_tiles`.
    """
    tensors = (a, b, c)
    bias = a if bias is None else bias  # a pointer of the right type; HAS_BIAS says whether it is read
    arguments = {"k_tiles": -(-a.shape[1] // config.block_k), **arguments, "num_warps": config.num_warps}
    blocks = [[config.block_m, config.block_k], [config.block_n, config.block_k]]
    if config.kind == "persistent":
        blocks.append([config.block_m, config.store_n])
        constants = {"NUM_BUFFERS": config.num_buffers, "STORE_BUFFERS": config.store_buffers}
        swizzled = (_swizzled(t, block) for t, block in zip(tensors, blocks, strict=True))
        return gemm_persistent, (*swizzled, bias), {**arguments, **constants}
    blocks.append([config.block_m, config.block_n])
    constants = {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "num_stages": config.num_buffers,
    }
    plain = (TensorDescriptor.from_tensor(t, block) for t, block in zip(tensors, blocks, strict=True))
    return gemm_classical, (*plain, bias), {**arguments, **constants}


def _swizzled(tensor: torch.Tensor, block: list[int]) -> SwizzledDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for(block, GL_DTYPES[tensor.dtype])
    return SwizzledDescriptor.from_tensor(tensor, block, layout)
