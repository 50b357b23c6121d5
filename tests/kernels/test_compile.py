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

from tests.kernels.variants import KERNELS, SEVERAL, TILE, TILES, compiled, hooks
from tilerelay.errors import InvalidInput, UnsupportedMachine
from tilerelay.graph.catalog import dense_chain
from tilerelay.graph.cut import cut
from tilerelay.graph.placement import Placement, pipelined, sharded
from tilerelay.kernels import compile as compiler
from tilerelay.kernels.call import gemm_call
from tilerelay.kernels.config import KernelConfig, configure
from tilerelay.kernels.entry import UNSPECIALISED
from tilerelay.kernels.protocol import LOAD_ROLE, MATH_ROLE, WAITING_ROLES, Hooks
from tilerelay.protocol.layout import RECORD_WORDS, WARPGROUPS, ProtocolLayout
from tilerelay.runtime.launch import Launch, make_piece
from tilerelay.runtime.tensors import OutputPlan
from tilerelay.runtime.workspace import Workspace

WIDTHS = [512, 768, 512, 256]
Call = tuple[JITFunction, tuple[Any, ...], dict[str, Any]]


def launched(
    kind: str, parts: tuple[int, ...], signalling: str, placement: Placement | None = None, replicate: bool = False
) -> Call:
    """What the runtime hands to Triton for parts of a chain of three that one kernel walks over."""
    placed = cut(dense_chain(300, WIDTHS, tile=TILE), placement or pipelined([0, 1, 2]))
    layout = ProtocolLayout(placed.workload, placed.placement, signalling)
    buffers = {device: torch.from_numpy(np.zeros(layout.size(device), dtype=np.uint8)) for device in layout.devices}
    stages = placed.workload.stages
    records = torch.zeros(len(stages), RECORD_WORDS, dtype=torch.int32)
    workspace = Workspace(layout, buffers, records, lambda words, device: words)
    plan = OutputPlan(placed, replicate)
    tensors = {place: torch.empty(shape, dtype=torch.bfloat16) for place, shape in plan.shapes.items()}
    x = torch.empty(300, WIDTHS[0], dtype=torch.bfloat16)
    pieces = []
    for i in parts:
        place, weight = plan.source(i), torch.empty(stages[i].grid.n, stages[i].k, dtype=torch.bfloat16)
        source = x if place is None else tensors[place]
        pieces.append(make_piece(workspace, i, source, weight, plan.copies(i, tensors), None))
    launch = Launch(configure(kind, TILE), pieces, workspace, grid=1, timeout_us=10**7)
    return launch._kernel, launch._arguments, launch._options


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
    kernel, args, kwargs = launched(kind, (stage,), signalling)
    assert compiler.compile_call(kernel, args, kwargs).ptx == compiled(kind, hooks(source, signal)).ptx


@pytest.mark.parametrize(
    ("devices", "replicate", "segments"),
    [
        (2, False, (hooks("order", "count", readers=2, copies=2), hooks("counter", "count", readers=2, copies=2),
                    hooks("counter", "silent"))),
        (3, True, (hooks("order", "count", readers=3, copies=3), hooks("counter", "count", readers=3, copies=3),
                   hooks("counter", "silent", copies=3))),
    ],
)  # fmt: skip
def test_the_segments_that_are_compiled_are_launched(
    devices: int, replicate: bool, segments: tuple[Hooks, ...]
) -> None:
    """All devices launch the same variant, with counters apart."""
    placement = sharded(WIDTHS[1:], range(devices))
    for device in range(devices):
        parts = tuple(range(device, 3 * devices, devices))
        call = launched("persistent", parts, "counter", placement, replicate)
        assert compiler.compile_call(*call).ptx == compiled("persistent", *segments, stride=32).ptx


CALLS = [
    *((kind, (1,), "queue", None) for kind in KERNELS),
    ("persistent", (0, 2, 4), "counter", sharded(WIDTHS[1:], [0, 1])),
]


@pytest.mark.parametrize(("kind", "parts", "signalling", "placement"), CALLS)
def test_integers_make_no_variants(
    kind: str, parts: tuple[int, ...], signalling: str, placement: Placement | None
) -> None:
    """There are two; the stages' own are in memory, so that other shapes of them make no variants either."""
    kernel, args, kwargs = launched(kind, parts, signalling, placement)
    assert [p.name for p in kernel.params if p.do_not_specialize] == UNSPECIALISED == ["words", "timeout_us"]
    values = [(n, m) for n in (0, 1, 2, 16, 17, 2**31 - 1) for m in (1, 16, 10**7)]
    variants = [compiler.specialise(kernel, (*args[:-2], *value), kwargs) for value in values]
    assert all(variant == variants[0] for variant in variants)
    signature = variants[0][0]
    assert {signature[name] for name in UNSPECIALISED} == {"i32"}
    assert "i32" not in {t for name, t in signature.items() if name not in UNSPECIALISED}


def test_every_role_that_may_wait_claims_the_abort_word_with_a_number_of_its_own() -> None:
    """CTA c's role r with WAITING_ROLES * c + r + 1."""
    roles = [LOAD_ROLE.value, *(MATH_ROLE.value + group for group in range(WARPGROUPS))]
    assert sorted(roles) == list(range(WAITING_ROLES.value))
    assert max(configure("persistent", (m, n)).warpgroups for m, n in TILES) == WARPGROUPS


@pytest.mark.parametrize(("kind", "parts", "signalling", "placement"), CALLS)
def test_all_pointers_are_known_to_be_aligned(
    kind: str, parts: tuple[int, ...], signalling: str, placement: Placement | None
) -> None:
    kernel, args, kwargs = launched(kind, parts, signalling, placement)

    def pointers(value: Any) -> int:
        return sum(map(pointers, value)) if isinstance(value, tuple) else isinstance(value, torch.Tensor)

    _, _, attributes, _ = compiler.specialise(kernel, args, kwargs)
    assert len(attributes) == pointers(args[-3]) > 12


def plain(ptx: str) -> str:
    """PTX without what depends on line numbers."""
    ptx = re.sub(r"//.*|^\s*\.loc\s.*|^\$L__tmp\d+:$", "", ptx[: ptx.index("\n\t.file")], flags=re.MULTILINE)
    return re.sub(r"\n\s*\n+", "\n", ptx)


@pytest.mark.parametrize(
    ("kind", "segments"),
    [
        *((kind, (hooks(*names),)) for kind in KERNELS for names in (("order", "silent"), ("queue", "push"))),
        ("classical", (hooks("counter", "count", readers=2, copies=2),)),
        ("persistent", SEVERAL["three stages"]),
    ],
)
def test_without_timestamps_the_code_is_that_of_kernels_that_have_none(
    kind: str, segments: tuple[Hooks, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = f"unstamped_{kind}_{segments[0].source}_{len(segments)}_{segments[0].copies}"
    (tmp_path / package).mkdir()
    stamped, names = ("protocol", "gemm_classical", "gemm_persistent"), "protocol|gemm_classical|gemm_persistent"
    for name in (*stamped, "entry"):
        text = Path(compiler.__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
        text, removed = re.subn(r"^ +stamp\(.*\n", "", text, flags=re.MULTILINE)
        assert bool(removed) == (name in stamped)
        text = re.sub(rf"tilerelay\.kernels(\.(?:{names})\b| import gemm_classical)", rf"{package}\1", text)
        (tmp_path / package / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    entry = importlib.import_module(f"{package}.entry").entry

    def unstamped(config: KernelConfig, pieces: Any, **rest: Any) -> Call:
        return (entry(config.kind, tuple(len(p.copies) for p in pieces)), *gemm_call(config, pieces, **rest)[1:])

    monkeypatch.setattr(compiler, "gemm_call", unstamped)
    code = compiler.compile_gemm(configure(kind, TILE), segments)
    assert f"{package}/gemm_{kind}.py" in code.ptx
    assert plain(code.ptx) == plain(compiled(kind, *segments).ptx)


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
        compiler.compile_gemm(configure("classical", TILE), [hooks("order", "silent")])


@pytest.mark.parametrize("wrong", [{"dtype": "fp8"}, {"activation": "tanh"}])
def test_unknown_types_and_activations_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(InvalidInput, match="choose"):
        compiler.compile_gemm(configure("classical", TILE), [hooks("order", "silent")], **wrong)  # type: ignore[arg-type]
