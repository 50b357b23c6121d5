"""Every kernel variant, compiled for Hopper, keeps the ordering rules on all paths of its code."""

from __future__ import annotations

import subprocess
import tempfile
from dataclasses import replace
from typing import Any

import pytest
import triton

from tests.kernels.ptx import Instruction, Program
from tests.kernels.ptx_rules import broken_rules, parameter_names, split_barriers, stored_in_bulk
from tests.kernels.variants import (
    ANNOUNCEMENTS,
    KERNELS,
    LOADS,
    SEVERAL,
    SIGNALS,
    SOURCES,
    STORES,
    TILE,
    TILES,
    compiled,
    hooks,
)
from tilerelay.kernels.activation import CODES
from tilerelay.kernels.config import HOPPER_SHARED_BYTES, MOST_SEGMENTS, configure
from tilerelay.kernels.protocol import COUNT, Hooks
from tilerelay.kernels.relay import BULK, IN_TURN, RELAYS

# All threads of the classical kernel compute and hold the tile; the compiler interleaves the erf of all its elements
# and runs out of registers, once a tile. Several segments with many copies have more pointers than fit the registers
# of a role: up to four are stored where the kernel begins. So have relays to several peers, which look at up to two
# of them for each kilobyte that they copy, and tiles in turn to several peers, which look at all their readers' tables
# at once. Everything else must keep its values in registers.
SPILLED_BYTES = {("classical", "gelu"): 128, ("persistent", "silu"): 32}
RELAY_SPILLED_BYTES, TURN_SPILLED_BYTES = 24, 40


def check(kind: str, *segments: Hooks, **options: Any) -> None:
    """Rules, resources, and no spills; options as for `compiled`."""
    code = compiled(kind, *segments, **options)
    seen = {name: options.get(name, False) for name in ("stamps", "bias")}
    assert broken_rules(code.ptx, kind=kind, segments=segments, shared=options.get("shared", ()), **seen) == []
    spilled = SPILLED_BYTES.get((kind, options.get("activation", "none")), 0)
    if any(segment.way in RELAYS and segment.copies > 2 for segment in segments):
        spilled = max(spilled, RELAY_SPILLED_BYTES)
    if any(segment.way == IN_TURN.value and segment.copies > 2 for segment in segments):
        spilled = max(spilled, TURN_SPILLED_BYTES)
    assert code.stack_bytes <= spilled, "registers are spilled"
    assert code.local_bytes == 0
    if kind == "persistent":
        # ptxas may make each product wait for the one before it, and says so to nobody who launches the kernel.
        assert products_waited_for(code.cubin) == code.ptx.count("wgmma.commit_group"), "products are serialised"
    whole_tile = any(segment.way == IN_TURN.value for segment in segments)
    config = configure(kind, options.get("tile", TILE), whole_tile=whole_tile)
    assert code.shared_bytes <= config.shared_bytes <= HOPPER_SHARED_BYTES


def products_waited_for(cubin: bytes) -> int:
    """Matrix products in the machine code that end a group which can be waited for."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = str(triton.knobs.nvidia.cuobjdump.path)
        text = subprocess.run([tool, "-sass", file.name], check=True, capture_output=True, text=True).stdout
    return sum("HGMMA" in line and "gsb" in line for line in text.splitlines())


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(("signal", "group_entries"), ANNOUNCEMENTS)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("kind", KERNELS)
def test_every_variant_keeps_the_rules(kind: str, source: str, signal: str, group_entries: bool, dtype: str) -> None:
    check(kind, hooks(source, signal, group_entries=group_entries), dtype=dtype)


@pytest.mark.parametrize(("source", "signal"), [("queue", "push"), ("counter", "count")])
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile[0]}x{tile[1]}")
@pytest.mark.parametrize("kind", KERNELS)
def test_every_tile_shape_keeps_the_rules(kind: str, tile: tuple[int, int], source: str, signal: str) -> None:
    check(kind, hooks(source, signal), tile=tile, stride=32 if signal == "count" else 1)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", CODES)
@pytest.mark.parametrize("kind", KERNELS)
def test_bias_and_activation_keep_the_rules(kind: str, bias: bool, activation: str) -> None:
    check(kind, hooks("queue", "push"), bias=bias, activation=activation)


@pytest.mark.parametrize(("source", "signal"), [("queue", "push"), ("counter", "count")])
@pytest.mark.parametrize("kind", KERNELS)
def test_timestamps_keep_the_rules(kind: str, source: str, signal: str) -> None:
    segment = hooks(source, signal)
    check(kind, segment, stamps=True)
    assert compiled(kind, segment, stamps=True).ptx.count("%globaltimer") > compiled(kind, segment).ptx.count(
        "%globaltimer"
    )


# Sums that two CTAs share


@pytest.mark.parametrize("tile", [(64, 256), (128, 256), (128, 128), (256, 128)], ids=lambda t: f"{t[0]}x{t[1]}")
@pytest.mark.parametrize(("source", "signal"), [("order", "silent"), ("order", "count"), ("counter", "count")])
def test_shared_sums_keep_the_rules(source: str, signal: str, tile: tuple[int, int]) -> None:
    check("persistent", hooks(source, signal), tile=tile, shared=(0,))


# Segments that store their tiles in bulk: only these share sums (launch.way_of). Of those that read what is sent in
# turn, one stands for all: they compile for long.
SHARERS = {
    name: bulk
    for name, segments in SEVERAL.items()
    if (bulk := tuple(s for s, segment in enumerate(segments) if segment.way == BULK.value))
    and name not in ("three stages, in turn", "elsewhere, in turn")
}


@pytest.mark.parametrize(
    "options", [{"bias": True, "activation": "silu"}, {"stamps": True}, {"dtype": "fp16"}], ids=str
)
@pytest.mark.parametrize("name", SHARERS)
def test_shared_sums_in_several_segments_keep_the_rules(name: str, options: dict[str, Any]) -> None:
    for shared in {SHARERS[name], SHARERS[name][:1], SHARERS[name][-1:]}:
        check("persistent", *SEVERAL[name], stride=32, shared=shared, **options)


def test_relayed_tiles_with_shared_sums_keep_the_rules() -> None:
    """Slower than bulk stores, and never chosen; right all the same."""
    check("persistent", *SEVERAL["three stages, relayed"], stride=32, shared=(0, 1, 2))


def test_a_warpgroup_that_waits_for_a_sum_meets_at_the_same_barriers() -> None:
    segment = hooks("order", "count")
    assert split_barriers(compiled("persistent", segment, shared=(0,)).ptx, "persistent", segment, (0,)) == []


@pytest.mark.parametrize("way", ["bulk", "relay", "in turn"])
def test_as_many_segments_and_copies_as_there_may_be_fit(way: str) -> None:
    """What the roles are handed lies in shared memory; eight copies are those of eight devices."""
    turns = {"kept": way == "in turn"}
    first, inner = (hooks(source, "count", readers=8, copies=8, way=way, **turns) for source in ("order", "counter"))
    segments = [first, *[inner] * (MOST_SEGMENTS - 2), hooks("counter", "silent", copies=8, way="relay but last")]
    if way == "in turn":
        segments = [first, *(replace(segment, in_steps=True) for segment in segments[1:])]
    shared = tuple(range(MOST_SEGMENTS))
    code = compiled("persistent", *segments, stride=32, bias=True, shared=shared)
    assert broken_rules(code.ptx, kind="persistent", segments=segments, bias=True, shared=shared) == []
    assert code.shared_bytes <= configure("persistent", TILE).shared_bytes <= HOPPER_SHARED_BYTES


# Segments and copies


@pytest.mark.parametrize("tile", [(128, 256), (128, 128), (64, 32)], ids=lambda tile: f"{tile[0]}x{tile[1]}")
@pytest.mark.parametrize("segments", SEVERAL.values(), ids=list(SEVERAL))
def test_several_segments_and_copies_keep_the_rules(segments: tuple[Hooks, ...], tile: tuple[int, int]) -> None:
    check("persistent", *segments, tile=tile, stride=32)


# One with both kinds of relay stands for them all, and one for those in turn: they compile for long, and the options
# change nothing in a relay.
STANDING = ("a relayed whole output on both", "three stages, in turn")
WITH_OPTIONS = [name for name in SEVERAL if name in STANDING or not ("relayed" in name or "in turn" in name)]


@pytest.mark.parametrize(
    "options", [{"bias": True, "activation": "gelu"}, {"stamps": True}, {"dtype": "fp16"}], ids=str
)
@pytest.mark.parametrize("name", WITH_OPTIONS)
def test_several_segments_with_all_options_keep_the_rules(name: str, options: dict[str, Any]) -> None:
    check("persistent", *SEVERAL[name], stride=32, **options)


@pytest.mark.parametrize(("readers", "copies"), [(2, 2), (3, 3), (1, 2), (2, 1), (4, 4)])
def test_a_classical_kernel_with_several_copies_keeps_the_rules(readers: int, copies: int) -> None:
    check("classical", hooks("counter", "count", readers=readers, copies=copies), stride=32)


@pytest.mark.parametrize("segments", SEVERAL.values(), ids=list(SEVERAL))
def test_every_copy_is_stored_before_one_fence_that_serves_all_readers(segments: tuple[Hooks, ...]) -> None:
    """In the code of each segment that publishes: so many stores, full waits, one fence, an add for each reader."""
    program = Program(compiled("persistent", *segments, stride=32).ptx, parameter_names(segments))

    def count(reached: set[int], prefix: str) -> int:
        return sum(program.instructions[n].opcode.startswith(prefix) for n in reached)

    def ends(i: Instruction) -> bool:
        """The next tile's stores, or the record of a wait that ends the run, which has a fence of its own."""
        record = i.opcode.startswith("st.") and program.memory(i).endswith(".control.record")
        return record or i.opcode.startswith("cp.async.bulk.tensor")

    for s, segment in enumerate(segments):

        def stores(i: Instruction, s: int = s) -> bool:
            return i.opcode.startswith("cp.async.bulk.tensor") and program.memory(i).startswith(f"{s}.c")

        stored = program.where(stores)
        assert len(stored) == STORES * stored_in_bulk(segment)
        if segment.signal != COUNT.value:
            continue
        tail = program.after(stored[-1], stop=ends)
        adds = [i for i in program.where(lambda i: i.opcode.startswith("atom.")) if i.index in tail]
        readers = {program.memory(i) for i in adds if ".scoreboard" in program.memory(i)}
        assert readers == {f"{s}.outbox{reader}.scoreboard" for reader in range(segment.kept, segment.readers)}
        assert count(tail, "fence.acq_rel.sys") == 1
        waits = [program.instructions[n] for n in tail if program.instructions[n].opcode.endswith("bulk.wait_group")]
        relayed = segment.way in RELAYS
        assert len(waits) == 2 + relayed, "one before the fence, one where the kernel ends, one before a relay"
        to_peers = [n for n in tail if program.memory(program.instructions[n]) == f"*{s}.relay.peers"]
        assert len(to_peers) == LOADS * (segment.copies - 1) * relayed


@pytest.mark.parametrize(
    ("source", "signal"),
    [("order", "push"), *((source, signal) for source in ("queue", "counter") for signal in SIGNALS)],
)
def test_the_warps_of_a_classical_cta_meet_at_the_same_barriers(source: str, signal: str) -> None:
    segment = hooks(source, signal)
    assert split_barriers(compiled("classical", segment).ptx, "classical", segment) == []
