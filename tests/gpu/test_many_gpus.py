"""Chains over three, four and eight GPUs give the oracle's bits; skipped where there are fewer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.gpu.cases import assert_replays, assert_runs, make
from tilerelay import Placement, dense_chain, pipelined, sharded
from tilerelay.graph.placement import Part

MANY = [4, 8]
SIGNALLINGS = ["queue", "counter"]


def need(gpus: int) -> list[int]:
    """The first devices, or a skip."""
    count = torch.cuda.device_count()
    if count < gpus:
        pytest.skip(f"needs {gpus} GPUs, this machine has {count}")
    return list(range(gpus))


def cut(*columns: tuple[int, int, int]) -> tuple[Part, ...]:
    """Parts of a stage: (device, first, end) each."""
    return tuple(Part(device, None, (first, end)) for device, first, end in columns)


def run(widths: list[int], m: int, placement: Placement, replays: int = 3, **options: Any) -> None:
    """Eagerly and as a graph, with outputs that are NaN before."""
    workload = dense_chain(m, widths, tile=options.pop("tile", (128, 256)), dtype=options.pop("dtype", "bf16"))
    pipe, x = make(workload, placement, **options)
    with pipe:
        assert_runs(pipe, x, replays)


@pytest.mark.parametrize("m", [1, 127, 1000, 4096, 16384])
@pytest.mark.parametrize("signalling", SIGNALLINGS)
@pytest.mark.parametrize("gpus", MANY)
def test_a_stage_per_gpu(gpus: int, signalling: str, m: int) -> None:
    run([512] + [520] * gpus, m, pipelined(need(gpus)), signalling=signalling)


@pytest.mark.parametrize("kernel", ["classical", "alternating"])
@pytest.mark.parametrize("signalling", SIGNALLINGS)
@pytest.mark.parametrize("gpus", MANY)
def test_kernels_of_a_stage_per_gpu(gpus: int, signalling: str, kernel: str) -> None:
    devices = need(gpus)
    kernels = ["classical" if kernel == "classical" or i % 2 else "persistent" for i in devices]
    run([512] * (gpus + 1), 1500, pipelined(devices), signalling=signalling, kernel=kernels, tile=(128, 128))


@pytest.mark.parametrize("signalling", SIGNALLINGS)
@pytest.mark.parametrize("gpus", MANY)
def test_devices_in_any_order(gpus: int, signalling: str) -> None:
    """Neighbouring stages on GPUs that are no neighbours."""
    devices = need(gpus)
    run([512] * (gpus + 1), 1500, pipelined(devices[1::2][::-1] + devices[::2]), signalling=signalling)


@pytest.mark.usefixtures("every_way")
@pytest.mark.parametrize("m", [1, 127, 1000, 4096, 16384])
@pytest.mark.parametrize("replicate", [False, True])
@pytest.mark.parametrize("gpus", MANY)
def test_sharded_rows(gpus: int, replicate: bool, m: int) -> None:
    widths = [512, 2048, 1032]
    run(widths, m, sharded(widths[1:], need(gpus)), replicate=replicate)


@pytest.mark.parametrize("layers", [1, 3, 8])
@pytest.mark.parametrize("tile", [(128, 256), (128, 128)])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("gpus", MANY)
def test_sharded_layers(gpus: int, dtype: str, tile: tuple[int, int], layers: int) -> None:
    widths = [256] + [2056] * layers
    run(widths, 700, sharded(widths[1:], need(gpus)), tile=tile, dtype=dtype)


@pytest.mark.parametrize("m", [127, 1500])
def test_stages_on_pairs(m: int) -> None:
    """Stage 1 on two GPUs, stage 2 on two others: every part feeds every part, all over links."""
    need(4)
    first, last = sharded([1024], [0, 1]).stages[0], sharded([520], [2, 3]).stages[0]
    run([512, 1024, 520], m, Placement((first, last)))
    run([512, 1024, 520], m, Placement((first, last)), replicate=True)
    run([512, 520, 1024], m, Placement((last, first)))


def test_whole_stages_beside_cut_ones() -> None:
    """One part feeds three, three feed one."""
    need(4)
    middle = sharded([1024], [1, 2, 3]).stages[0]
    run([256, 512, 1024, 512], 700, Placement(((Part(0, None, (0, 512)),), middle, (Part(0, None, (0, 512)),))))


@pytest.mark.usefixtures("every_way")
@pytest.mark.parametrize("replicate", [False, True])
def test_uneven_cuts_over_three(replicate: bool) -> None:
    need(3)
    first, last = cut((0, 0, 16), (1, 16, 1000), (2, 1000, 1024)), cut((2, 0, 264), (0, 264, 272), (1, 272, 520))
    run([512, 1024, 520], 700, Placement((first, last)), replicate=replicate)
    run([512, 1024, 520], 700, Placement((first, cut((1, 0, 512), (2, 512, 520)))), replicate=replicate)
    run([512, 1000, 520], 700, sharded([1000, 520], [2, 0, 1]), replicate=replicate)


@pytest.mark.parametrize("gpus", MANY)
def test_stages_share_gpus_in_pairs(gpus: int) -> None:
    """Twice as many stages as GPUs, each on half of one."""
    text = ",".join(f"{device}:66,{device}:66" for device in need(gpus))
    run([512] * (2 * gpus + 1), 1500, Placement.parse(text))


@pytest.mark.parametrize("how", [*SIGNALLINGS, "sharded"])
@pytest.mark.parametrize("gpus", MANY)
def test_a_thousand_replays(gpus: int, how: str) -> None:
    devices = need(gpus)
    widths = [512] + [1024] * gpus
    placement = sharded(widths[1:], devices) if how == "sharded" else pipelined(devices)
    options = {"replicate": True} if how == "sharded" else {"signalling": how}
    pipe, x = make(dense_chain(600, widths), placement, **options)
    with pipe:
        assert_replays(pipe, x)


@pytest.mark.parametrize("how", ["pipelined", "sharded"])
@pytest.mark.parametrize("gpus", MANY)
def test_paper_size(gpus: int, how: str) -> None:
    """N layers of 8192 on N GPUs, 16384 rows."""
    devices, widths = need(gpus), [8192] * (gpus + 1)
    run(widths, 16384, pipelined(devices) if how == "pipelined" else sharded(widths[1:], devices), replays=1)
