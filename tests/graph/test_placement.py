"""Placements: what they say, and what does not fit."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilerelay.errors import InvalidInput, PlacementError
from tilerelay.graph.placement import Part, Placement, pipelined, sharded, shared


def test_pipelined_gives_every_stage_a_device() -> None:
    placement = pipelined([2, 0, 1])
    assert placement.devices == (2, 0, 1)
    assert [placement.device_of(i) for i in range(3)] == [2, 0, 1]
    assert placement.is_pipelined and placement.kind == "pipelined"
    assert str(placement) == "2,0,1"


def test_shared_gives_neighbours_equal_shares_of_a_device() -> None:
    placement = shared(4, [0, 1], 132)
    assert str(placement) == "0:66,0:66,1:66,1:66"
    assert placement.devices == (0, 1) and placement.is_pipelined
    placement.check_sms({0: 132, 1: 132})


def test_shared_with_a_device_for_every_stage_is_pipelined() -> None:
    assert shared(2, [0, 1, 2], 132) == pipelined([0, 1])


@given(st.integers(1, 9), st.integers(1, 4), st.integers(16, 200))
def test_shares_always_fit(stages: int, devices: int, sms: int) -> None:
    placement = shared(stages, range(devices), sms)
    assert len(placement.stages) == stages
    placement.check_sms(dict.fromkeys(range(devices), sms))


@given(st.lists(st.integers(32, 500), min_size=1, max_size=4), st.integers(1, 4), st.sampled_from([1, 2, 8]))
def test_sharded_cuts_columns_evenly_and_without_gaps(columns: list[int], devices: int, multiple: int) -> None:
    placement = sharded(columns, range(devices), multiple=multiple)
    for total, parts in zip(columns, placement.stages, strict=True):
        cuts = [part.columns or (0, 0) for part in parts]
        assert [part.device for part in parts] == list(range(devices))
        assert cuts[0][0] == 0 and cuts[-1][1] == total
        assert all(left[1] == right[0] for left, right in pairwise(cuts))
        assert all(first % multiple == 0 and first < end for first, end in cuts)
        widths = [-(-(end - first) // multiple) for first, end in cuts]
        assert max(widths) - min(widths) <= 1
    assert not placement.is_pipelined and placement.kind == "sharded"


def test_a_sharded_placement_reads_well() -> None:
    assert str(sharded([64], [0, 1])) == "0[0:32]+1[32:64]"


@pytest.mark.parametrize("text", ["0,1", "3", "0:66,0:66,1:66,1:66", "1:1,0"])
def test_a_text_comes_back(text: str) -> None:
    assert str(Placement.parse(text)) == text


@pytest.mark.parametrize("text", ["", "a", "0,", "0:1:2", "0:x", "0-1", "0+1"])
def test_a_text_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(PlacementError, match="is not of the form 0,1 or 0:66,0:66,1:66,1:66"):
        Placement.parse(text)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (((),), "stage 0 is placed on no device; give it at least one"),
        (((Part(0), Part(1)),), "stage 0 is cut, but its part on device 0 names no columns; give every part"),
        (((Part(0, None, (0, 8)), Part(1, None, (16, 24))),), "leave a gap, overlap or are none; let each part begin"),
        (((Part(0, None, (8, 8)),),), "leave a gap, overlap or are none"),
        (((Part(0, None, (-8, 16)),),), "leave a gap, overlap or are none"),
        (((Part(0), Part(0)),), r"stage 0 is cut over devices \[0, 0\]; name each device once"),
        (((Part(-1),),), "device -1 does not exist; devices count from 0"),
        (((Part(0, 0),),), "a share of 0 SMs; give at least one"),
        (
            ((Part(0),), (Part(0),)),
            r"stages \[0, 1\], but stage 0 takes all of it; give each stage a share .* as in 0:66",
        ),
        (((Part(0, 66),), (Part(0),)), "but stage 1 takes all of it; give each stage a share of its SMs"),
        (
            ((Part(0, 66),), (Part(0, None, (0, 8)), Part(1, None, (8, 16)))),
            "stage 1 takes all of it; give each stage a",
        ),
        (((Part(0),), (Part(0, None, (0, 8)), Part(1, None, (8, 16)))), "stage 0 takes all of it; give each stage a"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(stages: tuple[tuple[Part, ...], ...], message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        Placement(stages)


def test_cut_stages_may_follow_each_other_on_their_devices() -> None:
    assert sharded([64, 64, 64], [0, 1]).devices == (0, 1)


def test_a_cut_stage_has_no_single_device() -> None:
    with pytest.raises(PlacementError, match="stage 1 is cut over 2 devices; place it whole, on one device"):
        sharded([64, 64], [0, 1]).device_of(1)


def test_shares_that_need_more_sms_than_there_are_are_refused() -> None:
    with pytest.raises(PlacementError, match="add up to 133 SMs, it has 132; make them smaller"):
        Placement.parse("0:66,0:67").check_sms({0: 132})
    Placement.parse("0:66,0:66").check_sms({0: 132})


def test_a_repeated_device_is_refused() -> None:
    with pytest.raises(PlacementError, match="give two stages on one device SM shares, as in 0:66,0:66"):
        pipelined([0, 0])
    with pytest.raises(PlacementError, match="name each device once"):
        shared(2, [0, 0], 132)
    with pytest.raises(PlacementError, match="name each device once"):
        sharded([64], [0, 0])


def test_more_stages_than_sms_are_refused() -> None:
    with pytest.raises(PlacementError, match="a share of 0 SMs; give at least one"):
        shared(3, [0], 2)


def test_too_few_columns_for_the_devices_are_refused() -> None:
    with pytest.raises(
        PlacementError, match="stage 1: 16 columns cannot be cut over 3 devices in multiples of 8; use fewer"
    ):
        sharded([64, 16], [0, 1, 2])


def test_nothing_to_place_is_refused() -> None:
    for make in (
        lambda: shared(2, [], 132),
        lambda: shared(0, [0, 1], 132),
        lambda: sharded([64], []),
        lambda: sharded([], [0]),
    ):
        with pytest.raises(PlacementError, match=r"stages on devices .*: give at least one of both"):
            make()
    for make in (lambda: pipelined([]), lambda: Placement(())):
        with pytest.raises(PlacementError, match="no stage is placed; name a device for each stage"):
            make()


def test_a_placement_error_is_an_invalid_input() -> None:
    assert issubclass(PlacementError, InvalidInput) and issubclass(InvalidInput, ValueError)
