"""Compile the GEMM kernels for Hopper on any machine, and say what the machine code needs.

What is compiled is what is launched: Triton derives types, alignments and constants from the arguments of a call, and
here it is given the same arguments by the same code (kernels.call), on the host, with a fixed target.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction, create_function_from_signature

from tilerelay.errors import InvalidInput, UnsupportedMachine
from tilerelay.kernels.activation import CODES
from tilerelay.kernels.call import Piece, gemm_call
from tilerelay.kernels.config import KernelConfig
from tilerelay.kernels.protocol import Control, Handover, Hooks, Inbox, Outbox, Segment
from tilerelay.kernels.relay import RELAYS, Relay
from tilerelay.kernels.sync import INTERPRETED

TARGET = GPUTarget("cuda", 90, 32)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")


@dataclass(frozen=True)
class CompiledGemm:
    """Code of one kernel variant for sm_90 and the resources that it needs.

    Attributes:
        shared_bytes: shared memory of a CTA.
        registers: per thread, at launch.
        stack_bytes, local_bytes: per thread; not 0 when registers are spilled.
    """

    ptx: str
    cubin: bytes
    shared_bytes: int
    registers: int
    stack_bytes: int
    local_bytes: int


def compile_gemm(
    config: KernelConfig,
    hooks: Sequence[Hooks],
    *,
    dtype: str = "bf16",
    bias: bool = False,
    activation: str = "none",
    stamps: bool = False,
    shared: Sequence[int] = (),
    stride: int = 1,
) -> CompiledGemm:
    """The kernel of `config` compiled for Hopper; needs no GPU.

    Args:
        hooks: of each segment that the kernel walks over; a classical kernel has one.
        bias, activation: of all segments.
        stamps: with timestamps.
        shared: segments in which CTAs share tiles' sums (persistent only).
        stride: int32 words between counters.

    Raises:
        InvalidInput: unknown dtype or activation.
        UnsupportedMachine: cuobjdump is missing, or Triton interprets kernels in this process.
    """
    if dtype not in DTYPES or activation not in CODES:
        raise InvalidInput(f"dtype {dtype!r} or activation {activation!r}: choose of {[*DTYPES]} and of {[*CODES]}")
    m, n, k = config.block_m, config.block_n, config.block_k
    a, b, c = (torch.empty(shape, dtype=DTYPES[dtype]) for shape in ((m, k), (n, k), (m, n)))
    word, pair = torch.empty(16, dtype=torch.int32), torch.empty(16, dtype=torch.int64)
    control = Control(word, word, word, word, word, word, word, pair, word, pair if stamps else None)
    handover = Handover(word, word, torch.empty(m, n))
    inbox, outbox = Inbox(pair, word, word, word, word), Outbox(word, word, word, word, word, word, word, pair, word)
    pieces = [
        Piece(
            a, b, (c,) * h.copies,
            Segment(
                control, inbox, (outbox,) * h.readers, b[0] if bias else None, handover if s in shared else None,
                Relay(c, pair) if h.way in RELAYS else None,
            ),
            h, CODES[activation],
        )
        for s, h in enumerate(hooks)
    ]  # fmt: skip
    return compile_call(*gemm_call(config, pieces, words=2, timeout_us=10**7, stride=stride))


def compile_call(kernel: JITFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CompiledGemm:
    """A kernel compiled for Hopper as `kernel[grid](*args, **kwargs)` would compile it.

    Raises:
        UnsupportedMachine: as `compile_gemm`.
    """
    signature, constants, attributes, options = specialise(kernel, args, kwargs)
    make_source = GluonASTSource if kernel.is_gluon() else ASTSource
    compiled = triton.compile(make_source(kernel, signature, constants, attributes), target=TARGET, options=options)
    cubin = compiled.asm["cubin"]
    registers, stack, local = _resource_usage(cubin)
    return CompiledGemm(compiled.asm["ptx"], cubin, compiled.metadata.shared, registers, stack, local)


def specialise(
    kernel: JITFunction, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[str, Any], dict[Any, Any], dict[Any, Any], dict[str, Any]]:
    """What Triton makes of a call: types, constants, alignments and options. Calls that agree in these share a variant.

    Raises:
        UnsupportedMachine: Triton interprets kernels in this process.
    """
    if INTERPRETED:
        raise UnsupportedMachine("TRITON_INTERPRET is set: kernels are interpreted; unset it before the import")
    # The steps of JITFunction.run up to the compilation; that method itself asks the driver of a GPU for the target.
    backend = make_backend(TARGET)
    kwargs = {**kwargs, "debug": False}
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = bind(*args, **kwargs)
    options, signature, constants, attributes = kernel._pack_args(backend, kwargs, bound, specialization, options)
    return signature, constants, attributes, options.__dict__


def _resource_usage(cubin: bytes) -> tuple[int, int, int]:
    """Registers, stack bytes and local bytes per thread."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        text = subprocess.run([_cuobjdump(), "-res-usage", path], check=True, capture_output=True, text=True).stdout
    found = _USAGE.findall(text)
    if len(found) != 1:
        raise UnsupportedMachine(f"cuobjdump named {len(found)} kernels in a cubin with one; its output:\n{text}")
    registers, stack, local = (int(n) for n in found[0])
    return registers, stack, local


def _cuobjdump() -> str:
    try:
        return str(triton.knobs.nvidia.cuobjdump.path)
    except (RuntimeError, AttributeError) as error:
        raise UnsupportedMachine(
            "cuobjdump is missing: Triton's package should carry it in backends/nvidia/bin; "
            "reinstall triton, or set TRITON_CUOBJDUMP_PATH to the one of a CUDA toolkit"
        ) from error
