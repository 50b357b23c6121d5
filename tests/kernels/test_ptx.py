"""Every kernel variant, compiled for Hopper, keeps the ordering rules on all paths of its code."""

from __future__ import annotations

import pytest

from tests.kernels.ptx_rules import broken_rules, split_barriers
from tests.kernels.variants import ANNOUNCEMENTS, KERNELS, SIGNALS, SOURCES, TILES, compiled
from tilerelay.kernels.activation import CODES
from tilerelay.kernels.compile import CompiledGemm
from tilerelay.kernels.config import HOPPER_SHARED_BYTES, configure

# All threads of the classical kernel compute and hold the tile; the compiler interleaves the erf of all its elements
# and runs out of registers, once a tile. Everything else must keep its values in registers.
SPILLED_BYTES = {("classical", "gelu"): 128}


def check(
    code: CompiledGemm,
    kind: str,
    source: str,
    signal: str,
    tile: tuple[int, int] = (128, 256),
    activation: str = "none",
    stamps: bool = False,
) -> None:
    assert broken_rules(code.ptx, kind=kind, source=SOURCES[source], signal=SIGNALS[signal], stamps=stamps) == []
    assert code.stack_bytes <= SPILLED_BYTES.get((kind, activation), 0), "registers are spilled"
    assert code.local_bytes == 0
    assert code.shared_bytes <= configure(kind, tile).shared_bytes <= HOPPER_SHARED_BYTES


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(("signal", "group_entries"), ANNOUNCEMENTS)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("kind", KERNELS)
def test_every_variant_keeps_the_rules(kind: str, source: str, signal: str, group_entries: bool, dtype: str) -> None:
    check(compiled(kind, source, signal, group_entries=group_entries, dtype=dtype), kind, source, signal)


@pytest.mark.parametrize(("source", "signal"), [("queue", "push"), ("counter", "count")])
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile[0]}x{tile[1]}")
@pytest.mark.parametrize("kind", KERNELS)
def test_every_tile_shape_keeps_the_rules(kind: str, tile: tuple[int, int], source: str, signal: str) -> None:
    check(compiled(kind, source, signal, tile=tile, stride=32 if signal == "count" else 1), kind, source, signal, tile)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", CODES)
@pytest.mark.parametrize("kind", KERNELS)
def test_bias_and_activation_keep_the_rules(kind: str, bias: bool, activation: str) -> None:
    code = compiled(kind, "queue", "push", bias=bias, activation=activation)
    check(code, kind, "queue", "push", activation=activation)


@pytest.mark.parametrize(("source", "signal"), [("queue", "push"), ("counter", "count")])
@pytest.mark.parametrize("kind", KERNELS)
def test_timestamps_keep_the_rules(kind: str, source: str, signal: str) -> None:
    code = compiled(kind, source, signal, stamps=True)
    check(code, kind, source, signal, stamps=True)
    assert code.ptx.count("%globaltimer") > compiled(kind, source, signal).ptx.count("%globaltimer")


@pytest.mark.parametrize(
    ("source", "signal"),
    [("order", "push"), *((source, signal) for source in ("queue", "counter") for signal in SIGNALS)],
)
def test_the_warps_of_a_classical_cta_meet_at_the_same_barriers(source: str, signal: str) -> None:
    assert split_barriers(compiled("classical", source, signal).ptx) == []
