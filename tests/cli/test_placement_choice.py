"""What the command takes for a placement that names a kind; no GPU is needed to see that."""

from __future__ import annotations

import pytest

from tilerelay.cli import chain
from tilerelay.runtime import cuda


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "check_machine", lambda devices: dict.fromkeys(devices, 132))


@pytest.mark.parametrize(
    ("m", "kernel", "devices", "tile", "says"),
    [
        (512, "persistent", "0,1", (128, 128), True),
        (4096, "persistent", "0,1", (128, 256), True),
        (4096, "persistent", "0", (128, 256), False),
        (512, "classical", "0,1", (128, 128), False),
    ],
)
def test_sharded_takes_the_tile_of_the_cost_model(
    m: int, kernel: str, devices: str, tile: tuple[int, int], says: bool
) -> None:
    placement, taken, why = chain._place("sharded", devices, 2, {"m": m, "n": 8192, "k": 8192}, "cuda", kernel)
    assert placement.kind == "sharded" and taken == tile
    assert (why is not None) == says
