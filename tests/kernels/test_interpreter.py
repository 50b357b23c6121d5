"""Device code under Triton's interpreter: the hooks over any dependency map, atomics between processes, conversions."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tilerelay.graph.dependency import from_prerequisites
from tilerelay.graph.placement import pipelined
from tilerelay.graph.tiling import TileGrid
from tilerelay.graph.workload import Edge, Stage, Workload
from tilerelay.protocol.layout import ProtocolLayout
from tilerelay.runtime.virtual_memory import SharedTensors
from tilerelay.runtime.virtual_workers import Workers

sys.path.append(str(Path(__file__).parent))  # the workers get this process's path, and find the programs there
from relay_program import RelayMemory, RelayProgram, Scratch

RUNS = 3
POISON = 0x7EAD_BEEF_7EAD_BEEF


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    started = Workers(3)
    yield started
    started.close()


# Any dependency map


def random_needs(rng: np.random.Generator, producers: int, kind: str) -> list[list[int]]:
    """Prerequisites of every consumer tile.

    "uniform": neighbours in groups of one size; "mixed": groups of any size, interleaved; "wide": more tiles than a
    warp has lanes, all fed by one.
    """
    if kind == "wide":
        return [[0, int(rng.integers(0, producers))] for _ in range(70)]
    pool: list[list[int]] = []
    while len(pool) < min(4, producers):  # there are at least as many subsets as tiles
        need = sorted(rng.choice(producers, size=int(rng.integers(1, producers + 1)), replace=False).tolist())
        pool += [] if need in pool else [need]
    if kind == "uniform":
        size = int(rng.integers(1, 4))
        return [need for need in pool for _ in range(size)]
    chosen = [0, len(pool) - 1, 0, *rng.integers(0, len(pool), size=int(rng.integers(1, 10))).tolist()]
    return [pool[i] for i in chosen]


def expected(needs: list[list[list[int]]], inputs: np.ndarray) -> list[np.ndarray]:
    """What every stage makes, with int64 arithmetic that wraps: one stage after the other."""
    values = [inputs]
    for stage, tiles in enumerate(needs):
        made = []
        for tile, need in enumerate(tiles):
            total = tile + 7 * stage + sum(int(values[-1][p]) * (2 * p + 3) for p in need)
            made.append((total + 2**63) % 2**64 - 2**63)
        values.append(np.array(made, dtype=np.int64))
    return values[1:]


@pytest.mark.parametrize("signalling", ["queue", "counter"])
@pytest.mark.parametrize(("kind", "seed"), [*((k, s) for k in ("uniform", "mixed") for s in range(4)), ("wide", 0)])
def test_any_dependency_map(workers: Workers, seed: int, kind: str, signalling: str) -> None:
    rng = np.random.default_rng([seed, len(kind)])
    inputs = int(rng.integers(2, 9))
    needs: list[list[list[int]]] = []
    for producers in [inputs, *[0] * 2]:
        needs.append(random_needs(rng, producers or len(needs[-1]), kind))
    stages = [Stage(f"s{i}", TileGrid(len(tiles), 1, 1, 1), k=1) for i, tiles in enumerate(needs)]
    grouped = [kind != "wide" and bool((seed + i) % 2) for i in (0, 1)]  # groups or one counter per tile, in turn
    edges = [Edge(i, i + 1, from_prerequisites(len(needs[i]), needs[i + 1], grouped=grouped[i])) for i in (0, 1)]
    tile_entries = [edge.dependencies.uniform_group_size is None for edge in edges]
    assert tile_entries == [kind == "mixed" and g for g in grouped], "the maps are not of the kind that is tested"
    workload, placement = Workload(tuple(stages), tuple(edges)), pipelined(range(3))
    layout = ProtocolLayout(workload, placement, signalling)
    memory = RelayMemory(workload, layout, 1 + max(map(max, needs[0])))
    first_epoch = [1, 2**31 - 2, 2**32 - 2, 2**30 - 2][seed]
    memory.workspace.reset(first_epoch)
    key = workers.make(RelayProgram, [(workload, placement, signalling, needs, i) for i in range(3)], memory.shared.fd)
    try:
        for run in range(RUNS):
            memory.values[0].copy_(torch.from_numpy(rng.integers(-(2**62), 2**62, len(memory.values[0]))))
            for made in memory.values[1:]:
                made.fill_(POISON)
            for worker in rng.permutation(3).tolist():
                workers.call(worker, key, "run")
            workers.gather(range(3), 60, "run")
            assert not memory.workspace.records.any(), f"run {run} was aborted"
            for stage, right in enumerate(expected(needs, memory.values[0].numpy())):
                assert memory.values[stage + 1].tolist() == right.tolist(), f"run {run}, stage {stage}"
    finally:
        workers.drop(key, 3)
        memory.shared.close()


# What the processes share


@pytest.fixture
def scratch(workers: Workers) -> Iterator[tuple[int, torch.Tensor]]:
    """A key of `Scratch` in the first two workers, and the two words that they share with this process."""
    shared = SharedTensors({"words": ((2,), torch.int32)})
    key = workers.make(Scratch, [(), ()], shared.fd)
    yield key, shared["words"]
    workers.drop(key, 2)
    shared.close()


def test_atomics_of_two_processes_lose_nothing(workers: Workers, scratch: tuple[int, torch.Tensor]) -> None:
    key, words = scratch
    for worker in (0, 1):
        workers.call(worker, key, "add", 400, 5)
    workers.gather([0, 1], 60, "add")
    assert words.tolist() == [2 * 400 * 5, 0]


def test_a_kernel_writes_back_only_what_it_stores(workers: Workers, scratch: tuple[int, torch.Tensor]) -> None:
    """The interpreter copies a kernel's tensors back when it ends: shared ones must not be, others write them too."""
    key, words = scratch
    workers.call(0, key, "linger", 5)
    end = time.monotonic() + 30
    while words[1] != 1 and time.monotonic() < end:
        time.sleep(0.001)
    words[0] = 5
    workers.gather([0], 60, "linger")
    assert words.tolist() == [5, 1]


# Conversions


def ask(workers: Workers, key: int, method: str, bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    workers.call(0, key, method, bits.tolist(), dtype)
    return torch.tensor(workers.gather([0], 60, method)[0])


def same(made: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal bits, or NaN both."""
    bits = torch.int16 if made.itemsize == 2 else torch.int32
    return bool(((made.view(bits) == right.view(bits)) | (made.isnan() & right.isnan())).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_16_bit_values_are_widened_as_by_torch(
    workers: Workers, scratch: tuple[int, Any], dtype: torch.dtype
) -> None:
    bits = torch.arange(2**16, dtype=torch.int32)
    made = ask(workers, scratch[0], "widen", bits, dtype).to(torch.int32).view(torch.float32)
    assert same(made, bits.to(torch.int16).view(dtype).float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("low", [0, 1, 0x1000, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_fp32_is_rounded_to_nearest_even_as_torch_does(
    workers: Workers, scratch: tuple[int, Any], low: int, dtype: torch.dtype
) -> None:
    """Every upper half, with lower halves below, at and above the middle between two bf16 values."""
    bits = ((torch.arange(2**16, dtype=torch.int64) << 16) + low).to(torch.int32)
    made = ask(workers, scratch[0], "narrow", bits, dtype).to(torch.int16).view(dtype)
    assert same(made, bits.view(torch.float32).to(dtype))
