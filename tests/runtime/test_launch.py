"""The size of a persistent grid, and how tiles get to other devices."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilerelay.graph.tiling import TileGrid
from tilerelay.graph.workload import Stage, with_walk
from tilerelay.kernels.relay import BULK, IN_TURN, RELAY, RELAY_BUT_LAST
from tilerelay.runtime.launch import balanced_grid, relay_of, way_of

STAGE = Stage("layer", TileGrid(3584, 4096, 128, 256), k=8192)


def waves(tiles: list[int], ctas: int) -> list[int]:
    return [-(-count // ctas) for count in tiles]


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=4), st.integers(1, 256))
def test_as_few_ctas_as_finish_in_the_same_waves(tiles: list[int], sms: int) -> None:
    grid = balanced_grid(tiles, sms)
    assert 1 <= grid <= min(max(tiles), sms)
    assert waves(tiles, grid) == waves(tiles, sms)
    assert grid == 1 or waves(tiles, grid - 1) != waves(tiles, sms)


def test_a_short_segment_is_not_stretched_for_a_long_one() -> None:
    """448 short tiles and 128 long ones on 132 SMs: 116 CTAs would do for all 576, but give some two long tiles."""
    assert balanced_grid([448, 128], 132) == 128


def way(**changes: Any) -> int:
    """Of a stage whose tiles are relayed, but for the changes."""
    usual: dict[str, Any] = {
        "kind": "persistent",
        "stage": STAGE,
        "copies": 2,
        "sms": 132,
        "last": False,
        "read_later": True,
    }
    return way_of(**(usual | changes))


@pytest.mark.parametrize("copies", [2, 3, 8])
@pytest.mark.parametrize("sms", [1, 132, STAGE.grid.tiles - 1])
def test_tiles_of_several_waves_are_relayed(copies: int, sms: int) -> None:
    assert way(copies=copies, sms=sms) == RELAY.value
    assert way(copies=copies, sms=sms, last=True) == RELAY_BUT_LAST.value


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        {"kind": "classical"},
        {"copies": 1},
        {"sms": STAGE.grid.tiles},
        {"stage": with_walk(STAGE, 132, unit=64)},
    ],
    ids=["classical", "one copy", "a single wave", "a walk"],
)
def test_all_other_tiles_are_stored_in_bulk(change: dict[str, Any], last: bool) -> None:
    assert way(**change, last=last) == BULK.value


def test_what_is_read_while_it_is_made_is_stored_in_bulk() -> None:
    assert way(read_later=False) == BULK.value
    assert way(read_later=False, last=True) == RELAY_BUT_LAST.value


@pytest.mark.parametrize("change", [{}, {"copies": 1}, {"read_later": False}, {"sms": STAGE.grid.tiles}])
def test_what_the_graph_sends_in_turn_is_sent_so(change: dict[str, Any]) -> None:
    assert way(stage=replace(STAGE, under_way=16), **change) == IN_TURN.value


def test_a_relay_goes_from_the_last_copy_to_all_others() -> None:
    *peers, own = copies = [torch.empty(2, 4) for _ in range(3)]
    relay = relay_of(copies)
    assert relay.own is own
    assert relay.peers.tolist() == [peer.data_ptr() for peer in peers]
