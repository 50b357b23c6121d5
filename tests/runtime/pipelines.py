"""Pipelines on virtual devices with random weights, and their comparison with the oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tilerelay import Pipeline
from tilerelay.graph.workload import Workload
from tilerelay.runtime.oracle import TORCH_DTYPES

Make = Callable[..., Pipeline]


def weights_of(workload: Workload, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    dtype = TORCH_DTYPES[workload.dtype]
    return [(torch.randn(s.grid.n, s.k, generator=generator) / s.k**0.5).to(dtype) for s in workload.stages]


def biases_of(workload: Workload) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(s.grid.n, generator=generator).to(TORCH_DTYPES[workload.dtype]) for s in workload.stages]


def x_of(workload: Workload, seed: int) -> torch.Tensor:
    first = workload.stages[0]
    x = torch.randn(first.grid.m, first.k, generator=torch.Generator().manual_seed(seed + 1000))
    return x.to(TORCH_DTYPES[workload.dtype])


def poison(pipeline: Pipeline) -> None:
    for output in pipeline._run.tensors.values():
        output.fill_(float("nan"))


def misbehave(pipeline: Pipeline, worker: int, fault: str, *arguments: Any) -> None:
    """Have a device, given by its place among the placement's devices, misbehave in the next run."""
    run: Any = pipeline._run
    run._workers.call(worker, run._key, "misbehave", fault, *arguments)
    run._workers.gather([worker], 30, "misbehave")


def differences(pipeline: Pipeline, x: torch.Tensor) -> list[tuple[int, int]]:
    """(stage, device) of every copy of an output that differs from the oracle's in any bit, or in place."""
    expected, last = pipeline.oracle(x), len(pipeline.workload.stages) - 1
    found = []
    for (stage, device), copy in pipeline._run.tensors.items():
        want = expected[stage]
        if stage == last and not pipeline.replicate:
            part = next(part for part in pipeline.placement.stages[last] if part.device == device)
            want = want if part.columns is None else want[:, slice(*part.columns)]
        if not torch.equal(copy, want):
            found.append((stage, device))
    return found


def wrong(pipeline: Pipeline, x: torch.Tensor) -> bool:
    """Any copy of any stage's output differs from the oracle's in any bit."""
    return bool(differences(pipeline, x))


def check(pipeline: Pipeline, seeds: int | list[int] = 2) -> None:
    """Runs on changing inputs, into NaN, and compares with the oracle bit for bit, and with fp32.

    The comparison with fp32 is of chains without activations and biases.
    """
    workload = pipeline.workload
    for seed in range(seeds) if isinstance(seeds, int) else seeds:
        poison(pipeline)
        x = x_of(workload, seed)
        y = pipeline(x)
        assert differences(pipeline, x) == [], f"run with seed {seed}"
        if any(stage.bias or stage.activation != "none" for stage in workload.stages):
            continue
        expected, parts = x.float(), pipeline._cut.parts_of
        for stage in range(len(workload.stages)):
            expected = expected @ torch.cat([pipeline._weights[part] for part in parts(stage)]).float().T
        made = y if isinstance(y, torch.Tensor) else torch.cat(y, dim=1)
        torch.testing.assert_close(made.float(), expected, rtol=0.05, atol=0.05)
