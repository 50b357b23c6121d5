"""Stages cut by columns over both GPUs, in one kernel per GPU, give the oracle's bits."""

from __future__ import annotations

import pytest

from tests.gpu.cases import assert_replays, assert_runs, make
from tilerelay import Placement, dense_chain, sharded
from tilerelay.graph.placement import Part

pytestmark = pytest.mark.usefixtures("every_way")


def run(widths: list[int], m: int, placement: Placement, **options: object) -> None:
    dtype, tile = options.pop("dtype", "bf16"), options.pop("tile", (128, 256))
    chain = {key: options.pop(key) for key in ("bias", "activation") if key in options}
    workload = dense_chain(m, widths, dtype=dtype, tile=tile, **chain)  # type: ignore[arg-type]
    pipe, x = make(workload, placement, **options)
    with pipe:
        assert_runs(pipe, x)


@pytest.mark.parametrize("m", [1, 64, 127, 128, 1000, 1024, 4096, 16384])
@pytest.mark.parametrize("replicate", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_rows(m: int, replicate: bool, dtype: str) -> None:
    widths = [512, 1024, 520]
    run(widths, m, sharded(widths[1:], [0, 1]), replicate=replicate, dtype=dtype)


@pytest.mark.parametrize("layers", [1, 2, 3, 5])
@pytest.mark.parametrize("tile", [(128, 256), (128, 128), (64, 256)])
def test_layers_and_tiles(layers: int, tile: tuple[int, int]) -> None:
    widths = [256] + [1032] * layers
    run(widths, 700, sharded(widths[1:], [0, 1]), tile=tile)


@pytest.mark.parametrize("device", [0, 1])
def test_one_device(device: int) -> None:
    run([256, 1024, 512], 700, sharded([1024, 512], [device]))


@pytest.mark.parametrize("kernel", ["classical", ["persistent", "classical"], ["classical", "persistent"]])
def test_kernels_that_cannot_share_a_launch(kernel: str | list[str]) -> None:
    run([256, 1024, 512], 700, sharded([1024, 512], [0, 1]), kernel=kernel, tile=(128, 128))


def test_uneven_and_mixed() -> None:
    uneven = (Part(0, None, (0, 1000)), Part(1, None, (1000, 1024)))
    other = (Part(1, None, (0, 16)), Part(0, None, (16, 512)))
    run([256, 1024, 512], 700, Placement((uneven, other)))
    run([256, 1024, 512], 700, Placement((uneven, (Part(0, None, (0, 512)),))), signalling="counter")
    run([256, 1024, 512], 700, Placement(((Part(1, None, (0, 1024)),), other)), signalling="counter")


def test_bias_and_activation() -> None:
    run([256, 1024, 512], 700, sharded([1024, 512], [0, 1]), bias=True, activation="silu")


def test_a_thousand_replays() -> None:
    widths = [512, 1024, 512]
    pipe, x = make(dense_chain(600, widths), sharded(widths[1:], [0, 1]), replicate=True)
    with pipe:
        assert_replays(pipe, x)
