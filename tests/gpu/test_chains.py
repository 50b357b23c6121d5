"""Every kernel, role, signalling, kind of dependencies and dtype gives the oracle's bits, at awkward shapes too."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.cases import assert_equals_oracle, assert_run, make, poison, reference
from tilerelay import Placement, dense_chain
from tilerelay.kernels.config import configure

ROWS = [1, 64, 127, 128, 1000, 1024, 4096, 16384]
# Roles: two stages are a first and a last one; of three, the middle one carries both hooks.
CHAINS = {
    "persistent": ("0:66,1,0:66", ["persistent"] * 3, [(128, 256)] * 3),
    "one GPU": ("0:44,0:44,0:44", ["persistent"] * 3, [(128, 256)] * 3),
    "one GPU, different tiles": ("0:40,0:40,0:52", ["persistent"] * 3, [(64, 256), (128, 128), (256, 128)]),
    "classical ends": ("0,1", ["classical"] * 2, [(128, 128)] * 2),
    "classical middle": (
        "0:66,1,0:66",
        ["persistent", "classical", "persistent"],
        [(128, 256), (128, 128), (128, 256)],
    ),
    "different tiles": ("0:66,1,0:66", ["persistent"] * 3, [(64, 256), (128, 128), (128, 256)]),
}


def run_chain(chain: str, m: int, k: int, n: int, signalling: str, grouped: bool, dtype: str) -> None:
    from tilerelay.graph.tiling import TileGrid
    from tilerelay.graph.workload import Stage
    from tilerelay.graph.workload import chain as make_chain

    placement, kernels, tiles = CHAINS[chain]
    widths = [k] + [n] * len(kernels)
    stages = [Stage(f"layer{i}", TileGrid(m, widths[i + 1], *tiles[i]), widths[i]) for i in range(len(kernels))]
    workload = make_chain(stages, dtype=dtype, grouped=grouped)
    pipe, x = make(workload, Placement.parse(placement), kernel=kernels, signalling=signalling)
    with pipe:
        assert_run(pipe, x)


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("grouped", [True, False], ids=["grouped", "per-tile"])
@pytest.mark.parametrize("signalling", ["queue", "counter"])
@pytest.mark.parametrize("chain", CHAINS)
def test_rows(chain: str, signalling: str, grouped: bool, dtype: str, m: int) -> None:
    run_chain(chain, m, 512, 520, signalling, grouped, dtype)


@pytest.mark.parametrize("blocks", ["1", "2", "stages-1", "stages", "stages+1"])
@pytest.mark.parametrize("chain", CHAINS)
def test_k_blocks(chain: str, blocks: str) -> None:
    buffers = configure(CHAINS[chain][1][0], CHAINS[chain][2][0]).num_buffers
    k = 64 * {"1": 1, "2": 2, "stages-1": buffers - 1, "stages": buffers, "stages+1": buffers + 1}[blocks]
    run_chain(chain, 300, k, k, "queue", True, "bf16")
    run_chain(chain, 300, k - 8, k - 8, "counter", True, "bf16")  # a ragged last block


@pytest.mark.parametrize("activation", ["none", "relu", "gelu", "silu"])
@pytest.mark.parametrize(
    ("kernel", "placement"), [("persistent", "0,1"), ("classical", "0,1"), ("persistent", "0:66,0:66")]
)
def test_bias_and_activation(kernel: str, placement: str, activation: str) -> None:
    tile = (128, 256) if kernel == "persistent" else (128, 128)
    workload = dense_chain(500, [256, 1000, 264], tile=tile, bias=True, activation=activation)
    pipe, x = make(workload, Placement.parse(placement), kernel=kernel)
    with pipe:
        poison(pipe)
        y = pipe(x).to(x.device)
        pipe.synchronize()
        assert_equals_oracle(pipe, x)
        expected = reference(x, workload, pipe._weights, pipe._biases)  # type: ignore[arg-type]
        torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("signalling", ["queue", "counter"])
@pytest.mark.parametrize(
    "placement",
    [
        "0:66,0:66,1:66,1:66",
        "0:33,0:33,0:33,0:33,1:33,1:33,1:33,1:33",
        "0:30,0:60,0:30",
        "1:16,0:16,1:16,0:16,1:16,0:16,1:16,0:16",
    ],
)
def test_sm_shares(placement: str, signalling: str) -> None:
    """Four- and eight-stage chains on two GPUs, and a chain on one."""
    placed = Placement.parse(placement)
    workload = dense_chain(1500, [512] * (len(placed.stages) + 1))
    pipe, x = make(workload, placed, signalling=signalling)
    with pipe:
        graph = pipe.capture(x)
        for _ in range(3):
            poison(pipe)
            graph.replay()
            pipe.synchronize()
            assert_equals_oracle(pipe, x)


@pytest.mark.parametrize("placement", ["0,1", "0:66,0:66"])
def test_paper_size(placement: str) -> None:
    """X [16384, 8192] through two 8192 x 8192 weights: close to fp32 and equal to the oracle."""
    workload = dense_chain(16384, [8192, 8192, 8192])
    pipe, x = make(workload, Placement.parse(placement))
    with pipe:
        poison(pipe)
        y = pipe(x).to(x.device)
        pipe.synchronize()
        assert_equals_oracle(pipe, x)
        expected = reference(x[:512], workload, pipe._weights, None)
        error = (y[:512].float() - expected.float()).norm() / expected.float().norm()
        assert error < 5e-3
