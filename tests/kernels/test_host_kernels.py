"""Kernels outside kernels/ compile for the GPU, too: nothing else compiles them on a machine without one."""

from triton.compiler import ASTSource
from triton.compiler import compile as triton_compile

from tilerelay.kernels.compile import TARGET
from tilerelay.runtime.cuda import PATTERN_WORDS, _write_pattern


def test_the_peer_check_compiles() -> None:
    signature = {"out": "*i32", "first": "i32", "COUNT": "constexpr"}
    compiled = triton_compile(ASTSource(_write_pattern, signature, {(2,): PATTERN_WORDS}), target=TARGET)
    assert "st.global" in compiled.asm["ptx"]
