"""The checks of the PTX notice every rule that is broken in it; and the reader of its control flow."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.kernels.ptx import Instruction, Program
from tests.kernels.ptx_rules import broken_rules, parameter_names, split_barriers, stored_in_bulk
from tests.kernels.variants import KERNELS, LOADS, SEVERAL, STORES, WAYS, compiled, hooks
from tilerelay.kernels.protocol import ORDER, SILENT, Hooks
from tilerelay.kernels.relay import BULK, RELAYS

FENCE = r"fence\.acq_rel\.sys;"
PROXY_FENCE = r"fence\.proxy\.async;"
LATE_WAIT = r"fence.acq_rel.sys; \1cp.async.bulk.wait_group 0;"
COUNT = r"atom\.global\.sys\.relaxed\.add"
GATHER = r"atom\.global\.gpu\.acq_rel\.add"
PUSH_ENTRY = r"atom\.global\.sys\.release\.exch\.b64"
POLL = r"ld\.global\.sys\.acquire"
CAS = r"(@%p\d+ atom\.global\.[\w.]*cas)"
INTEGER = r"\t\.param \.u32 \w+_param_\d+,\n(?=\t\.param \.u32)"
AROUND = r"{ @%p1 bra around; \1 around: mov.u32 %r1, %r1; }"
FULL_WAIT = r"cp\.async\.bulk\.wait_group 0;"
NOTHING = "mov.u32 %r1, %r1;"
BARRIER = r"bar\.(?:warp\.)?sync\s+-?\d+;"
BULK_STORE = r"@%p\d+ cp\.async\.bulk\.tensor\.[\w.:]*global\.shared::cta[^;]*;"
# (change, signal of the kernel, what is searched, what it becomes, rule that must notice)
MUTATIONS = [
    ("the full wait becomes a read-only one", "push", FULL_WAIT, "cp.async.bulk.wait_group.read 0;", "rule 1"),
    ("no full wait", "count", FULL_WAIT, "", "rule 1"),
    ("a full wait for one group fewer", "push", FULL_WAIT, "cp.async.bulk.wait_group 1;", "rule 1"),
    ("the full wait is predicated", "push", FULL_WAIT, "@%p1 cp.async.bulk.wait_group 0;", "rule 1"),
    ("a branch around the full wait", "push", f"({FULL_WAIT})", AROUND, "rule 1"),
    ("no barrier before the fence", "count", rf"({FULL_WAIT}[^}}]*?){BARRIER}", r"\1", "rule 2"),
    ("no barrier at all", "push", BARRIER, "", "rule 2"),
    ("no barrier after a poll", "push", BARRIER, "", "rule 4"),
    ("no system fence", "push", FENCE, "", "rule 3"),
    ("a fence of the device", "count", FENCE, "fence.acq_rel.gpu;", "rule 3"),
    ("the fence before the wait", "count", rf"{FULL_WAIT}(.*?){FENCE}", LATE_WAIT, "rule 3"),
    ("a fence for every counter", "count", rf"(@%p\d+ {COUNT})", r"fence.acq_rel.sys; \1", "rule 3"),
    ("a count for this device only", "count", COUNT, "atom.global.gpu.relaxed.add", "rule 3"),
    ("a count that gathers nothing", "push", GATHER, "atom.global.gpu.relaxed.add", "rule 3"),
    ("a push that releases nothing", "push", PUSH_ENTRY, "atom.global.sys.relaxed.exch.b64", "rule 3"),
    ("a push for this device only", "push", PUSH_ENTRY, "atom.global.gpu.release.exch.b64", "rule 3"),
    ("a relaxed poll", "push", POLL, "ld.global.sys.relaxed", "rule 4"),
    ("a poll of this device only", "count", POLL, "ld.global.gpu.acquire", "rule 4"),
    ("a volatile poll", "count", POLL, "ld.volatile.global", "rule 4"),
    ("no proxy fence", "push", PROXY_FENCE, "", "rule 4"),
    ("a proxy fence for shared memory only", "count", PROXY_FENCE, "fence.proxy.async.shared::cta;", "rule 4"),
    ("the epoch is another word", "push", "<control.epoch>", "<control.order>", "rule 6"),
    ("the numbers are another word", "count", "<control.numbers>", "<control.order>", "rule 6"),
    ("an integer was folded into the code", "push", INTEGER, "", "rule 6"),
    ("a wait without a deadline", "count", r"%globaltimer", "%clock64", "rule 7"),
    ("a wait blind to the abort", "push", "<control.abort>", "<control.order>", "rule 7"),
    ("a trap", "count", CAS, r"trap; \1", "rule 7"),
    ("an early exit", "push", CAS, r"@%p1 ret; \1", "rule 7"),
]  # fmt: skip


def broken(ptx: str, kind: str, *segments: Hooks, shared: tuple[int, ...] = ()) -> set[str]:
    """The rules that the checks say are broken."""
    return {line.split(":")[0] for line in broken_rules(ptx, kind=kind, segments=segments, shared=shared)}


def addressed(text: str, *segments: Hooks, segment: int = 0) -> str:
    """Parameters by their names: <control.epoch> is how PTX writes that word's address."""
    names = parameter_names(segments)
    return re.sub(r"<([\w.]+)>", lambda m: f"_param_{names.index(f'{segment}.{m[1]}')}]", text)


@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.parametrize(("change", "signal", "pattern", "becomes", "rule"), MUTATIONS, ids=[m[0] for m in MUTATIONS])
def test_a_broken_rule_is_noticed(kind: str, change: str, signal: str, pattern: str, becomes: str, rule: str) -> None:
    segment = hooks("queue" if signal == "push" else "counter", signal)
    pattern, becomes = addressed(pattern, segment), addressed(becomes, segment)
    changed, count = re.subn(pattern, becomes, compiled(kind, segment).ptx, flags=re.DOTALL)
    assert count, f"nothing to change for {change!r}"
    assert rule in broken(changed, kind, segment)


@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.parametrize(
    ("source", "signal", "taken_for", "rule"),
    [
        ("order", "silent", ("order", "push"), "rule 3"),
        ("order", "push", ("order", "silent"), "rule 3"),
        ("order", "push", ("order", "count"), "rule 3"),
        ("order", "count", ("order", "push"), "rule 3"),
        ("order", "silent", ("queue", "silent"), "rule 4"),
        ("queue", "silent", ("order", "silent"), "rule 4"),
    ],
)
def test_another_variant_is_noticed(kind: str, source: str, signal: str, taken_for: tuple[str, str], rule: str) -> None:
    actual, taken = hooks(source, signal), hooks(*taken_for)
    # As many outboxes as the kernel has, so that its parameters keep their names.
    taken = replace(taken, readers=actual.readers)
    ptx = compiled(kind, actual).ptx
    if actual.signal == SILENT.value != taken.signal:
        assert broken(ptx, kind, replace(taken, readers=1)) == {"rule 6"}, "its parameters are fewer"
        assert rule in broken(ptx, kind, taken)
    else:
        assert rule in broken(ptx, kind, taken)


# Several segments and copies: a mistake in any one of them

MISTAKEN = [
    "a whole output on both", "three stages", "a relayed whole output on both", "three stages, relayed",
    "three stages, in turn", "elsewhere, in turn",
]  # fmt: skip


def published(segment: Hooks) -> int:
    """How often: to a reader here first, where the others' tiles are sent in turn."""
    return (segment.signal != SILENT.value) * (1 + segment.kept)


@pytest.mark.parametrize("segments", [SEVERAL[name] for name in MISTAKEN], ids=MISTAKEN)
@pytest.mark.parametrize(
    ("pattern", "becomes", "rule", "places"),
    [
        (FENCE, "", "rule 3", published),
        (FENCE, r"\g<0> \g<0>", "rule 3", published),
        # The wait of a relay serves for publishing, too.
        (FULL_WAIT, "", "rule 1", lambda h: published(h) or h.way != BULK.value),
        (PROXY_FENCE, "", "rule 4", lambda h: (h.source != ORDER.value) * (1 + h.in_steps)),
        (COUNT, "atom.global.gpu.relaxed.add", "rule 3", lambda h: h.readers),
        (BULK_STORE, NOTHING, "rule 1", lambda h: STORES * stored_in_bulk(h) * (stored_in_bulk(h) > 1)),
    ],
    ids=["no fence", "two fences", "no full wait", "no proxy fence", "a count for this device", "a part of a copy"],
)
def test_a_mistake_in_any_one_place_is_noticed(
    segments: tuple[Hooks, ...], pattern: str, becomes: str, rule: str, places: Callable[[Hooks], int]
) -> None:
    """As many places matter as the segments' tiles, readers, or parts of copies (an instruction each) have.

    The others are not on a tile's way; and a part of a copy is missed where another copy in bulk has it.
    """
    ptx = compiled("persistent", *segments, stride=32).ptx
    changes = [ptx[: m.start()] + m.expand(becomes) + ptx[m.end() :] for m in re.finditer(pattern, ptx)]
    noticed = sum(rule in broken(changed, "persistent", *segments) for changed in changes)
    assert noticed == sum(map(places, segments))


# Relays


def once(_: Hooks) -> int:
    return 1


TO_PEER = r"@%p\d+ st\.global\.b64 [^;]*;"
PAST_L1 = r"ld\.global\.cg\."
# From a tile's last bulk store to its first load; from its last store to a peer to the fence; and all of its relay.
BEFORE = rf"{BULK_STORE}(?:(?!{BULK_STORE}).)*?{PAST_L1}"
AFTER = rf"{TO_PEER}(?:(?!{TO_PEER}).)*?{FENCE}"
WHOLE = rf"{BULK_STORE}(?:(?!{BULK_STORE}).)*{TO_PEER}.*?{BARRIER}"
TO_FENCE = rf"{WHOLE}.*?{FENCE}"
WAIT_BARRIER = rf"{FULL_WAIT}.*?{BARRIER}"
# (change, where, what is searched there, what it becomes, rule that must notice, how often in a relayed segment)
RELAY_MUTATIONS = [
    ("no full wait", BEFORE, FULL_WAIT, "", "rule 1", once),
    ("a read-only wait", BEFORE, FULL_WAIT, "cp.async.bulk.wait_group.read 0;", "rule 1", once),
    ("a branch around the full wait", BEFORE, f"({FULL_WAIT})", AROUND, "rule 1", once),
    ("a part that is stored late", WHOLE, rf"\A({BULK_STORE})(.*)", r"\2 \1", "rule 1", once),
    ("a load that L1 may answer", PAST_L1, PAST_L1, "ld.global.", "rule 1", lambda h: LOADS),
    ("a part that a peer misses", TO_PEER, TO_PEER, NOTHING, "rule 1", lambda h: LOADS * (h.copies - 1)),
    ("no barrier before the loads", BEFORE, rf"({FULL_WAIT}.*?){BARRIER}", r"\1", "rule 2", once),
    ("the barrier before the wait", BEFORE, rf"({FULL_WAIT}.*?)({BARRIER})", r"\2 \1", "rule 2", once),
    ("no barrier after the stores", AFTER, BARRIER, "", "rule 2", published),
    ("no fence", AFTER, FENCE, "", "rule 3", published),
    ("a fence of the device", AFTER, FENCE, "fence.acq_rel.gpu;", "rule 3", published),
    ("the fence before the loads", TO_FENCE, rf"({WAIT_BARRIER})(.*)({FENCE})", r"\1 \3 \2", "rule 3", published),
]  # fmt: skip
RELAYED = [name for name in SEVERAL if "relayed" in name]


@pytest.mark.parametrize("segments", [SEVERAL[name] for name in RELAYED], ids=RELAYED)
@pytest.mark.parametrize(
    ("change", "where", "pattern", "becomes", "rule", "places"), RELAY_MUTATIONS, ids=[m[0] for m in RELAY_MUTATIONS]
)
def test_a_mistake_in_any_one_relay_is_noticed(
    segments: tuple[Hooks, ...],
    change: str,
    where: str,
    pattern: str,
    becomes: str,
    rule: str,
    places: Callable[[Hooks], int],
) -> None:
    ptx = compiled("persistent", *segments, stride=32).ptx
    noticed = 0
    for m in re.finditer(where, ptx, flags=re.DOTALL):
        changed, count = re.subn(pattern, becomes, m[0], flags=re.DOTALL)
        assert count, f"nothing to change for {change!r}"
        noticed += rule in broken(ptx[: m.start()] + changed + ptx[m.end() :], "persistent", *segments)
    assert noticed == sum(places(h) for h in segments if h.way != BULK.value)


@pytest.mark.parametrize("access", ["ld.global.cg.b32 %r1, [%rd9001];", "st.global.b32 [%rd9002], %r1;"])
def test_a_relay_where_none_should_be_is_noticed(access: str) -> None:
    segment = hooks("order", "count", readers=2, copies=2)
    ptx = compiled("persistent", segment).ptx
    addresses = "ld.param.b64 %rd9001, [any<control.abort_words>; ld.global.b64 %rd9002, [%rd9001];"
    codes = [addressed(code, segment) for code in (addresses, addresses + access)]
    changes = [re.sub(f"({FULL_WAIT})", rf"\1 {code}", ptx) for code in codes]
    assert [broken(changed, "persistent", segment) for changed in changes] == [set(), {"rule 1"}]


RELAYS_BY_NAME = {name for name, way in WAYS.items() if way in RELAYS}


@pytest.mark.parametrize("taken_for", WAYS)
@pytest.mark.parametrize("way", WAYS)
def test_another_way_of_the_tiles_is_noticed(way: str, taken_for: str) -> None:
    actual, taken = (hooks("order", "count", readers=2, copies=2, way=name) for name in (way, taken_for))
    same_parameters = not RELAYS_BY_NAME & {way, taken_for}
    found = broken(compiled("persistent", actual).ptx, "persistent", taken)
    assert found == set() if way == taken_for else ("rule 8" if same_parameters else "rule 6") in found


# Turns and steps

LOOK = r"atom\.global\.sys\.acquire\.add"
READ_WAIT = r"cp\.async\.bulk\.wait_group\.read\s+0;"
LET_GO = rf"({READ_WAIT}(?:(?!{READ_WAIT}).)*?)@%p\d+ atom\.global\.gpu\.relaxed\.exch[^;]*;"


# (change, what is searched, what it becomes, rule that must notice)
TURN_MUTATIONS = [
    ("a relaxed look", LOOK, "atom.global.sys.relaxed.add", "rule 4"),
    ("a look of this device", LOOK, "atom.global.gpu.acquire.add", "rule 4"),
    ("nobody is let go", LET_GO, r"\1", "rule 8"),
    ("let go early", READ_WAIT, "", "rule 8"),
    ("turns and steps without a deadline", r"%globaltimer", "%clock64", "rule 7"),
]


@pytest.mark.parametrize(("change", "pattern", "becomes", "rule"), TURN_MUTATIONS, ids=[m[0] for m in TURN_MUTATIONS])
def test_a_mistake_in_turns_and_steps_is_noticed(change: str, pattern: str, becomes: str, rule: str) -> None:
    segment = hooks("counter", "count", readers=2, copies=2, way="in turn", in_steps=True, kept=True)
    ptx = compiled("persistent", segment).ptx
    changed, count = re.subn(pattern, becomes, ptx, flags=re.DOTALL)
    assert count, f"nothing to change for {change!r}"
    assert broken(ptx, "persistent", segment) == set()
    assert rule in broken(changed, "persistent", segment)


@pytest.mark.parametrize(("pattern", "what"), [(BARRIER, "barrier"), (PROXY_FENCE, "proxy fence")])
def test_what_is_missing_after_either_wait_for_inputs_is_noticed(pattern: str, what: str) -> None:
    """After the prologue's polls and after the look at a later step's."""
    segment = hooks("counter", "silent", in_steps=True)
    ptx = re.sub(pattern, "", compiled("persistent", segment).ptx)
    missing = [line for line in broken_rules(ptx, kind="persistent", segments=[segment]) if f"no {what}" in line]
    assert {opcode for line in missing for opcode in ("ld.", "atom.") if f" {opcode}" in line} == {"ld.", "atom."}


def test_a_tile_that_is_announced_elsewhere_before_it_is_sent_is_noticed() -> None:
    """The reader here, told first, and the other one change places: the latter's tile has not been sent then."""
    segment = hooks("counter", "count", readers=2, copies=2, way="in turn", in_steps=True, kept=True)
    ptx = compiled("persistent", segment).ptx
    names = parameter_names([segment])
    here, there = (f"_param_{names.index(f'0.outbox{reader}.scoreboard')}]" for reader in (0, 1))
    assert here in ptx and there in ptx
    changed = ptx.replace(here, "<there>").replace(there, here).replace("<there>", there)
    assert broken(changed, "persistent", segment) == {"rule 1"}


def test_a_turn_without_a_deadline_is_noticed() -> None:
    segment = hooks("order", "count", way="in turn")  # nothing but turns is waited for
    ptx = compiled("persistent", segment).ptx
    changed, count = re.subn(r"%globaltimer", "%clock64", ptx)
    assert count and broken(ptx, "persistent", segment) == set()
    assert broken(changed, "persistent", segment) == {"rule 7"}


# Sums that two CTAs share

OF_A_WARPGROUP = r"bar\.sync\s+\d+, 128;"
GIVE = r"atom\.global\.gpu\.release\.exch"
TAKE = r"ld\.global\.sys\.acquire\.b32"


@pytest.mark.parametrize(
    ("pattern", "becomes", "rule"),
    [
        (OF_A_WARPGROUP, "", "rule 2"),
        (GIVE, "atom.global.gpu.relaxed.exch", "rule 3"),
        (GIVE, "atom.global.cta.release.exch", "rule 3"),
        (TAKE, "ld.volatile.global.b32", "rule 4"),
        (TAKE, "ld.global.cta.acquire.b32", "rule 4"),
        (OF_A_WARPGROUP, "", "rule 4"),
        (r"%globaltimer", "%clock64", "rule 7"),
        (r"<control.abort>", "<control.order>", "rule 7"),
        (r"<control.epoch>", "<control.order>", "rule 6"),
    ],
    ids=[
        "no barrier",
        "relaxed",
        "within a CTA",
        "volatile",
        "poll of a CTA",
        "no barrier after it",
        "clock",
        "abort",
        "epoch",
    ],
)
def test_a_mistake_in_handing_a_sum_over_is_noticed(pattern: str, becomes: str, rule: str) -> None:
    segment = hooks("order", "silent")  # nothing but sums is waited for
    pattern, becomes = addressed(pattern, segment), addressed(becomes, segment)
    ptx = compiled("persistent", segment, shared=(0,)).ptx
    changed, count = re.subn(pattern, becomes, ptx)
    assert count, "nothing to change"
    assert broken(ptx, "persistent", segment, shared=(0,)) == set()
    assert rule in broken(changed, "persistent", segment, shared=(0,))


@pytest.mark.parametrize(
    "name", ["control.epoch", "control.numbers", "control.abort", "control.record", "relay.own", "relay.peers"]
)
@pytest.mark.parametrize("segment", [0, 1])
def test_a_segment_that_looks_at_anothers_words_is_noticed(segment: int, name: str) -> None:
    segments = SEVERAL["a relayed whole output on both"]
    ptx = compiled("persistent", *segments, stride=32).ptx
    own, other = (addressed(f"<{name}>", *segments, segment=s) for s in (segment, 1 - segment))
    changed = ptx.replace(own, other)
    if changed == ptx:
        assert segment == 0 and name == "control.record", "the first segment waits for nothing"
    else:
        assert broken(changed, "persistent", *segments) & {
            "rule 1" if name.startswith("relay.") else "rule 6",
            "rule 7",
        }


@pytest.mark.parametrize("lone", ["ld.volatile.global.b32 %r1, [%rd1];", "mov.u64 %r1, %globaltimer;"])
def test_a_barrier_that_some_warps_may_miss_is_noticed(lone: str) -> None:
    segment = hooks("counter", "count")
    ptx = compiled("classical", segment).ptx
    abort = parameter_names([segment]).index("0.control.abort")
    decision = f"{lone} setp.ne.b32 %p1, %r1, 0; @%p1 bra around; bar.sync 0; around: mov.u32 %r2, %r2;"
    changed, count = re.subn(FULL_WAIT, f"ld.param.b64 %rd1, [gemm_classical_1_param_{abort}]; {{ {decision} }}", ptx)
    assert count and split_barriers(ptx, "classical", segment) == [] != split_barriers(changed, "classical", segment)


def test_a_barrier_that_some_warps_of_a_warpgroup_may_miss_is_noticed() -> None:
    """Each thread looks at its own clock before a barrier of the warpgroup."""
    segment = hooks("order", "count")
    ptx = compiled("persistent", segment, shared=(0,)).ptx
    decision = "mov.u64 %rd1, %globaltimer; setp.ne.b64 %p1, %rd1, 0; @%p1 bra around;"
    changed, count = re.subn(rf"({OF_A_WARPGROUP})", rf"{{ {decision} \1 around: mov.u32 %r2, %r2; }}", ptx, count=1)
    assert count and split_barriers(changed, "persistent", segment, (0,))


def program(body: str) -> Program:
    head = ".visible .entry kernel(\n\t.param .u64 .ptr .global .align 16 kernel_param_0\n)\n"
    return Program(f"{head}{{\n{body}\n}}\n\t.file 1", ["memory"])


def opcode(name: str):  # type: ignore[no-untyped-def]
    return lambda i: i.opcode == name


def test_paths_follow_labels_branches_and_predicates() -> None:
    code = program("a.x; @%p1 bra $end; b.x; bra.uni $end; never.x; $end: c.x; ret;")
    by_name = {i.opcode: i for i in code.instructions}
    assert [code.instructions[n].opcode for n in by_name["bra"].next] == ["c.x", "b.x"]
    assert by_name["never.x"].index not in code.reached([0])
    assert code.unordered(opcode("a.x"), [opcode("b.x")], opcode("c.x")), "the branch goes around b"
    assert not code.unordered(opcode("b.x"), [opcode("bra.uni")], opcode("c.x"))
    split = code.between_split_and_join(by_name["bra"])
    assert {code.instructions[n].opcode for n in split} == {"b.x", "bra.uni"}


def test_what_a_predicate_guards_orders_nothing() -> None:
    assert program("a.x; @%p1 b.x; c.x; ret;").unordered(opcode("a.x"), [opcode("b.x")], opcode("c.x"))
    assert not program("a.x; b.x; c.x; ret;").unordered(opcode("a.x"), [opcode("b.x")], opcode("c.x"))


def test_labels_of_inline_assembly_belong_to_their_scope() -> None:
    loop = "{ .reg .pred done; wait: try.x done, [%r1]; @!done bra.uni wait; }"
    code = program(f"{loop} {loop} ret;")
    assert [[code.instructions[n].index for n in i.next] for i in code.instructions] == [[1], [0, 2], [3], [2, 4], []]


def test_jump_tables_lead_to_the_roles_and_end_them() -> None:
    jump = "$head: brx.idx %r1, $table; $table: .branchtargets\n $one,\n $two;"
    code = program(f"{jump} $one: a.x; bra $head; $two: b.x; ret;")
    assert [code.instructions[n].opcode for n in code.roles] == ["a.x", "b.x"]
    assert "b.x" not in {code.instructions[n].opcode for n in code.reached(code.roles[:1])}


def test_addresses_are_traced_to_the_parameter_that_they_come_from() -> None:
    code = program(
        "ld.param.b64 %rd1, [kernel_param_0]; mad.wide.s32 %rd2, %r1, 4, %rd1; ld.global.b64 { %rd3 }, [ %rd2 + 0 ];"
        "add.s64 %rd4, %rd3, 8; ld.volatile.global.b32 { %r2 }, [%rd2]; setp.eq.b32 %p1, %r2, 0;"
        "st.global.b32 [ %rd4 + 0 ], { %r2 }; ld.global.b32 { %r3 }, [%rd2]; ret;"
    )
    load, store = code.instructions[2], code.instructions[6]
    assert (code.memory(load), code.memory(store)) == ("memory", "*memory")
    assert code.origins("%p1") == {"volatile *memory"}
    assert not code.origins("%r3"), "32 bits are no address"


def test_operands_are_split_outside_brackets() -> None:
    assert Instruction(0, "", "cp.x", "[%rd1, {%r1, %r2}], [%r3], 4").parts == ["[%rd1, {%r1, %r2}]", "[%r3]", "4"]
