"""What is compiled is what is launched, in one variant whatever its integers, and timestamps cost nothing when off."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
from triton.runtime.jit import JITFunction

from tests.kernels.variants import KERNELS, SIGNALS, SOURCES, compiled
from tilerelay.errors import InvalidInput, UnsupportedMachine
from tilerelay.graph.library import dense_chain
from tilerelay.graph.placement import pipelined
from tilerelay.kernels import compile as compiler
from tilerelay.kernels.call import gemm_call
from tilerelay.kernels.config import KernelConfig, configure
from tilerelay.kernels.gemm_classical import UNSPECIALISED
from tilerelay.protocol.layout import RECORD_WORDS, ProtocolLayout
from tilerelay.runtime.launch import stage_arguments
from tilerelay.runtime.workspace import Workspace

TILE = (128, 256)


Call = tuple[JITFunction, tuple[Any, ...], dict[str, Any]]


def launched(kind: str, stage: int, signalling: str) -> Call:
    """What the runtime hands to Triton for a stage of a chain of three."""
    workload = dense_chain(300, [512, 768, 512, 256], tile=TILE)
    layout = ProtocolLayout(workload, pipelined([0, 1, 2]), signalling)
    buffers = {device: torch.from_numpy(np.zeros(layout.size(device), dtype=np.uint8)) for device in layout.devices}
    workspace = Workspace(layout, buffers, torch.zeros(3, RECORD_WORDS, dtype=torch.int32), lambda words, device: words)
    arguments = stage_arguments(workspace, stage, timeout_us=10**7)
    s = workload.stages[stage]
    shapes = (s.grid.m, s.k), (s.grid.n, s.k), (s.grid.m, s.grid.n)
    a, b, c = (torch.empty(shape, dtype=torch.bfloat16) for shape in shapes)
    return gemm_call(configure(kind, TILE), a, b, c, None, arguments)


@pytest.mark.parametrize(
    ("stage", "signalling", "source", "signal"),
    [
        (0, "queue", "order", "push"),
        (1, "queue", "queue", "push"),
        (2, "queue", "queue", "silent"),
        (0, "counter", "order", "count"),
        (1, "counter", "counter", "count"),
    ],
)
@pytest.mark.parametrize("kind", KERNELS)
def test_what_is_compiled_is_what_is_launched(kind: str, stage: int, signalling: str, source: str, signal: str) -> None:
    kernel, args, kwargs = launched(kind, stage, signalling)
    assert compiler.compile_call(kernel, args, kwargs).ptx == compiled(kind, source, signal).ptx


@pytest.mark.parametrize("kind", KERNELS)
def test_integers_make_no_variants(kind: str) -> None:
    kernel, args, kwargs = launched(kind, 1, "queue")
    assert [p.name for p in kernel.params if p.do_not_specialize] == UNSPECIALISED
    values = [dict.fromkeys(UNSPECIALISED, n) for n in (0, 1, 2, 16, 17, 2**31 - 1)]
    variants = [compiler.specialise(kernel, args, {**kwargs, **value}) for value in values]
    assert all(variant == variants[0] for variant in variants)
    assert {variants[0][0][name] for name in UNSPECIALISED} == {"i32"}


@pytest.mark.parametrize("kind", KERNELS)
def test_all_pointers_are_known_to_be_aligned(kind: str) -> None:
    kernel, args, kwargs = launched(kind, 1, "queue")
    pointers = [t for group in ("control", "inbox", "outbox") for t in kwargs[group] if t is not None]
    _, _, attributes, _ = compiler.specialise(kernel, args, kwargs)
    assert len(attributes) == len(pointers) + 1  # the bias


def plain(ptx: str) -> str:
    """PTX without what depends on line numbers."""
    ptx = re.sub(r"//.*|^\s*\.loc\s.*|^\$L__tmp\d+:$", "", ptx[: ptx.index("\n\t.file")], flags=re.MULTILINE)
    return re.sub(r"\n\s*\n+", "\n", ptx)


@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.parametrize(("source", "signal"), [("order", "silent"), ("queue", "push"), ("counter", "count")])
def test_without_timestamps_the_code_is_that_of_kernels_that_have_none(
    kind: str, source: str, signal: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = f"unstamped_{kind}_{source}"
    (tmp_path / package).mkdir()
    names = ("protocol", "gemm_classical", "gemm_persistent")
    for name in names:
        text = Path(compiler.__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
        text, removed = re.subn(r"^ +stamp\(.*\n", "", text, flags=re.MULTILINE)
        assert removed
        text = re.sub(rf"tilerelay\.kernels\.({'|'.join(names)})\b", rf"{package}.\1", text)
        (tmp_path / package / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    kernel = getattr(importlib.import_module(f"{package}.gemm_{kind}"), f"gemm_{kind}")

    def unstamped(config: KernelConfig, *rest: Any) -> Call:
        return (kernel, *gemm_call(config, *rest)[1:])

    monkeypatch.setattr(compiler, "gemm_call", unstamped)
    code = compiler.compile_gemm(configure(kind, TILE), source=SOURCES[source], signal=SIGNALS[signal])
    assert plain(code.ptx) == plain(compiled(kind, source, signal).ptx)


def test_a_missing_cuobjdump_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tools:
        @property
        def cuobjdump(self) -> str:
            raise RuntimeError("Cannot find cuobjdump")

    monkeypatch.setattr(triton.knobs, "nvidia", Tools())
    with pytest.raises(UnsupportedMachine, match="cuobjdump is missing"):
        compiler._cuobjdump()


def test_an_interpreting_process_cannot_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "INTERPRETED", True)
    with pytest.raises(UnsupportedMachine, match="TRITON_INTERPRET"):
        compiler.compile_gemm(configure("classical", TILE), source=0, signal=0)


@pytest.mark.parametrize("wrong", [{"dtype": "fp8"}, {"activation": "tanh"}])
def test_unknown_types_and_activations_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(InvalidInput, match="choose"):
        compiler.compile_gemm(configure("classical", TILE), source=0, signal=0, **wrong)  # type: ignore[arg-type]
