"""Chains with random data for the GPU tests, and their comparison with the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tilerelay import Pipeline, Placement
from tilerelay.graph.workload import Workload
from tilerelay.runtime.oracle import TORCH_DTYPES

NAN = float("nan")


def random_tensor(*shape: int, device: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Normal values, scaled so that a product over the last axis stays near one."""
    generator = torch.Generator(f"cuda:{device}").manual_seed(seed)
    values = torch.randn(*shape, device=f"cuda:{device}", generator=generator)
    return (values / shape[-1] ** 0.5).to(dtype)


def make(workload: Workload, placement: Placement, **options: Any) -> tuple[Pipeline, torch.Tensor]:
    """A pipeline with random weights and biases, and an input."""
    dtype = TORCH_DTYPES[workload.dtype]
    devices = [parts[0].device for parts in placement.stages]
    weights = [
        random_tensor(s.grid.n, s.k, device=d, dtype=dtype, seed=i)
        for i, (s, d) in enumerate(zip(workload.stages, devices, strict=True))
    ]
    biases = (
        [random_tensor(s.grid.n, device=d, dtype=dtype, seed=9) for s, d in zip(workload.stages, devices, strict=True)]
        if workload.stages[0].bias
        else None
    )
    first = workload.stages[0]
    x = random_tensor(first.grid.m, first.k, device=devices[0], dtype=dtype, seed=99)
    options.setdefault("timeout_s", 5.0)
    return Pipeline(workload, weights, biases=biases, placement=placement, **options), x


def poison(pipe: Pipeline) -> None:
    """Fill every output and intermediate with NaN."""
    for tensor in (*pipe.intermediates, *pipe.outputs):
        tensor.fill_(NAN)
    for device in pipe.placement.devices:
        torch.cuda.synchronize(device)


def assert_equals_oracle(pipe: Pipeline, x: torch.Tensor) -> None:
    """Output and intermediates are the oracle's, bit for bit, and hold no NaN."""
    expected = pipe.oracle(x)
    torch.cuda.synchronize(x.device)
    last = len(pipe.workload.stages) - 1
    for (stage, device), got in pipe._run.tensors.items():
        want = expected[stage]
        if stage == last and len(pipe.outputs) > 1 and not pipe.replicate:
            part = next(p for p in pipe.placement.stages[last] if p.device == device)
            want = want[:, slice(*part.columns)]
        assert not got.isnan().any(), f"stage {stage} left elements unwritten on device {device}"
        assert torch.equal(want.to(got.device), got), f"stage {stage} differs from the oracle on device {device}"


def reference(
    x: torch.Tensor, workload: Workload, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor] | None
) -> torch.Tensor:
    """The chain in fp32 with torch, rounding between the stages as the pipeline does."""
    activations = {
        "none": lambda t: t,
        "relu": torch.relu,
        "gelu": torch.nn.functional.gelu,
        "silu": torch.nn.functional.silu,
    }
    for i, stage in enumerate(workload.stages):
        product = x.float() @ weights[i].to(x.device).float().T
        if biases is not None:
            product = product + biases[i].to(x.device).float()
        x = activations[stage.activation](product).to(x.dtype)
    return x
