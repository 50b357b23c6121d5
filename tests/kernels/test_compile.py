"""What is compiled is what is launched, in one variant whatever its integers, and timestamps cost nothing when off."""

from __future__ import annotations

import importlib
import re
from dataclasses import replace
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
from tilerelay.graph.turns import with_turns
from tilerelay.kernels import call
from tilerelay.kernels import compile as compiler
from tilerelay.kernels.config import configure
from tilerelay.kernels.entry import UNSPECIALISED
from tilerelay.kernels.protocol import LOAD_ROLE, MATH_ROLE, STORE_ROLE, WAITING_ROLES, Hooks
from tilerelay.kernels.relay import RELAYS
from tilerelay.protocol.layout import RECORD_WORDS, WARPGROUPS, ProtocolLayout
from tilerelay.runtime.launch import Launch, make_piece, relay_of, way_of
from tilerelay.runtime.tensors import OutputPlan
from tilerelay.runtime.workspace import Workspace

WIDTHS = [512, 768, 512, 256]
Call = tuple[JITFunction, tuple[Any, ...], dict[str, Any]]


def launched(
    kind: str,
    parts: tuple[int, ...],
    signalling: str,
    placement: Placement | None = None,
    replicate: bool = False,
    sms: int = 132,
    turns: bool = False,
) -> Call:
    """What the runtime hands to Triton for parts of a chain of three that one kernel walks over.

    Args:
        sms: 132 compute a part's tiles in one wave; 1 in several, which may be relayed.
        turns: tiles are sent in turn where they can be.
    """
    placed = cut(dense_chain(300, WIDTHS, tile=TILE), placement or pipelined([0, 1, 2]))
    if turns:
        count = len(placed.origin)
        placed = replace(placed, workload=with_turns(placed, [sms] * count, [True] * count))
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
        copies, readers = plan.copies(i, tensors), {placed.workload.edges[e].consumer for e in layout.out_edges(i)}
        later = bool(readers & set(parts))
        way = way_of(kind, stages[i], len(copies), sms, last=not readers, read_later=later)
        relay = relay_of(copies) if way in RELAYS else None
        pieces.append(make_piece(workspace, i, source, weight, copies, None, way=way, relay=relay))
    launch = Launch(configure(kind, TILE, whole_tile=turns), pieces, workspace, grid=1, timeout_us=10**7)
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
    ("devices", "replicate", "sms", "ways"),
    [
        (2, False, 132, ("bulk", "bulk", "bulk")),
        (3, True, 132, ("bulk", "bulk", "bulk")),
        (2, False, 1, ("relay", "relay", "bulk")),
        (3, True, 1, ("relay", "relay", "relay but last")),
    ],
)
def test_the_segments_that_are_compiled_are_launched(
    devices: int, replicate: bool, sms: int, ways: tuple[str, str, str]
) -> None:
    """All devices launch the same variant, with counters apart."""
    placement = sharded(WIDTHS[1:], range(devices))
    segments = [
        hooks("order", "count", readers=devices, copies=devices, way=ways[0]),
        hooks("counter", "count", readers=devices, copies=devices, way=ways[1]),
        hooks("counter", "silent", copies=devices if replicate else 1, way=ways[2]),
    ]
    for device in range(devices):
        parts = tuple(range(device, 3 * devices, devices))
        launch = launched("persistent", parts, "counter", placement, replicate, sms)
        assert compiler.compile_call(*launch).ptx == compiled("persistent", *segments, stride=32).ptx


@pytest.mark.parametrize("devices", [2, 3])
def test_what_is_sent_in_turn_is_compiled_so(devices: int) -> None:
    placement = sharded(WIDTHS[1:], range(devices))
    turn: dict[str, Any] = {"readers": devices, "copies": devices, "way": "in turn", "kept": True}
    segments = [
        hooks("order", "count", **turn), hooks("counter", "count", **turn, in_steps=True),
        hooks("counter", "silent", in_steps=True),
    ]  # fmt: skip
    for device in range(devices):
        parts = tuple(range(device, 3 * devices, devices))
        launch = launched("persistent", parts, "counter", placement, turns=True)
        assert compiler.compile_call(*launch).ptx == compiled("persistent", *segments, stride=32).ptx
    alone = [hooks("order", "count", way="in turn"), hooks("counter", "count", way="in turn", in_steps=True)]
    for part, segment in enumerate(alone):
        launch = launched("persistent", (part,), "counter", turns=True)
        assert compiler.compile_call(*launch).ptx == compiled("persistent", segment).ptx


CALLS = [
    *((kind, (1,), "queue", None, 132) for kind in KERNELS),
    *(("persistent", (0, 2, 4), "counter", sharded(WIDTHS[1:], [0, 1]), sms) for sms in (132, 1)),
]


@pytest.mark.parametrize(("kind", "parts", "signalling", "placement", "sms"), CALLS)
def test_integers_make_no_variants(
    kind: str, parts: tuple[int, ...], signalling: str, placement: Placement | None, sms: int
) -> None:
    """There are two; the stages' own are in memory, so that other shapes of them make no variants either."""
    kernel, args, kwargs = launched(kind, parts, signalling, placement, sms=sms)
    assert [p.name for p in kernel.params if p.do_not_specialize] == UNSPECIALISED == ["words", "timeout_us"]
    values = [(n, m) for n in (0, 1, 2, 16, 17, 2**31 - 1) for m in (1, 16, 10**7)]
    variants = [compiler.specialise(kernel, (*args[:-2], *value), kwargs) for value in values]
    assert all(variant == variants[0] for variant in variants)
    signature = variants[0][0]
    assert {signature[name] for name in UNSPECIALISED} == {"i32"}
    assert "i32" not in {t for name, t in signature.items() if name not in UNSPECIALISED}


def test_every_role_that_may_wait_claims_the_abort_word_with_a_number_of_its_own() -> None:
    """CTA c's role r with WAITING_ROLES * c + r + 1."""
    roles = [LOAD_ROLE.value, STORE_ROLE.value, *(MATH_ROLE.value + group for group in range(WARPGROUPS))]
    assert sorted(roles) == list(range(WAITING_ROLES.value))
    assert max(configure("persistent", (m, n)).warpgroups for m, n in TILES) == WARPGROUPS


@pytest.mark.parametrize(("kind", "parts", "signalling", "placement", "sms"), CALLS)
def test_all_pointers_are_known_to_be_aligned(
    kind: str, parts: tuple[int, ...], signalling: str, placement: Placement | None, sms: int
) -> None:
    kernel, args, kwargs = launched(kind, parts, signalling, placement, sms=sms)

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
        ("persistent", SEVERAL["a relayed whole output on both"]),
    ],
)
def test_without_timestamps_the_code_is_that_of_kernels_that_have_none(
    kind: str, segments: tuple[Hooks, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = f"unstamped_{kind}_{segments[0].source}_{len(segments)}_{segments[0].copies}_{segments[0].way}"
    (tmp_path / package).mkdir()
    stamped, others = ("protocol", "gemm_classical", "gemm_persistent"), ("handover", "store_role", "entry")
    names = "|".join((*stamped, *others[:-1]))
    for name in (*stamped, *others):
        text = Path(compiler.__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
        text, removed = re.subn(r"^ +stamp\(.*\n", "", text, flags=re.MULTILINE)
        assert bool(removed) == (name in stamped)
        text = re.sub(rf"tilerelay\.kernels(\.(?:{names})\b| import gemm_classical)", rf"{package}\1", text)
        (tmp_path / package / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(call, "entry", importlib.import_module(f"{package}.entry").entry)
    code = compiler.compile_gemm(configure(kind, TILE), segments)
    assert all(f"{package}/{name}.py" in code.ptx for name in ("protocol", f"gemm_{kind}"))
    assert "kernels/protocol.py" not in code.ptx
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
