"""The choice of placement and tile: cheapest of what is possible, and it says why."""

import pytest

from tilerelay.errors import PlacementError
from tilerelay.graph.choice import choose


def test_sharded_wins_where_pipelines_lag() -> None:
    choice = choose(1024, [8192, 8192, 8192], [0, 1])
    assert choice.placement.kind == "sharded" and choice.tile == (128, 256)
    assert set(choice.costs) == {
        f"{kind} {tile}" for kind in ("pipelined", "sharded") for tile in ("128 x 256", "128 x 128")
    }
    assert "sharded" in str(choice) and "pipelined 128 x 256 1.50" in str(choice)  # three waves for two


def test_the_small_tile_is_for_few_tiles() -> None:
    assert choose(512, [8192, 8192, 8192], [0, 1]).tile == (128, 128)
    assert choose(512, [8192, 8192, 8192], [0, 1], kinds=["sharded"]).placement.kind == "sharded"
    assert set(choose(4096, [8192, 8192, 8192], [0, 1], kinds=["pipelined"]).costs) == {
        "pipelined 128 x 128",
        "pipelined 128 x 256",
    }
    assert choose(4096, [8192, 8192, 8192], [0, 1]).tile == (128, 256)


def test_more_layers_than_devices_are_cut() -> None:
    choice = choose(2048, [4096] * 5, [0, 1])
    assert choice.placement.kind == "sharded" and all(name.startswith("sharded") for name in choice.costs)


def test_one_device_and_one_layer() -> None:
    assert choose(2048, [4096, 4096], [3]).placement.devices == (3,)


def test_what_cannot_be_placed() -> None:
    with pytest.raises(PlacementError):
        choose(2048, [4096] * 3, [0])
