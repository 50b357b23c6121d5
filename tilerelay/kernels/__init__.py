"""Device code: synchronisation primitives, prologue, epilogue, and the GEMMs that carry them."""

import triton

from tilerelay.errors import UnsupportedMachine

SUPPORTED_TRITON = "3.6."

if not triton.__version__.startswith(SUPPORTED_TRITON):
    raise UnsupportedMachine(
        f"Triton {triton.__version__} is installed; the kernels need {SUPPORTED_TRITON}x, which torch 2.11 brings: "
        f"later versions call Gluon's TMA functions differently"
    )
