"""Chains with random data for the GPU tests, and their comparison with the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
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


def needs(gpus: int) -> None:
    """Skip the test on a machine with fewer GPUs."""
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} Hopper GPUs")


def make(workload: Workload, placement: Placement, **options: Any) -> tuple[Pipeline, torch.Tensor]:
    """A pipeline with random weights and biases, and an input. Skips where there are fewer GPUs than are placed."""
    needs(max(placement.devices) + 1)
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
    _synchronize(pipe)


def outputs_of(pipe: Pipeline, whole: torch.Tensor) -> list[torch.Tensor]:
    """What `pipe.outputs` should be: copies of the whole output, or of each part's columns, on their devices."""
    parts = pipe.placement.stages[-1]
    cut = len(parts) > 1 and not pipe.replicate
    columns = [slice(*part.columns) if cut else slice(None) for part in parts]
    return [whole[:, of].to(y.device).clone() for y, of in zip(pipe.outputs, columns, strict=True)]


def assert_equals_oracle(pipe: Pipeline, x: torch.Tensor) -> None:
    """Output and intermediates are the oracle's, bit for bit, and hold no NaN."""
    expected = pipe.oracle(x)
    torch.cuda.synchronize(x.device)
    last = len(pipe.workload.stages) - 1
    inner = [(stage, got, expected[stage]) for (stage, _), got in pipe._run.tensors.items() if stage < last]
    outer = [(last, *pair) for pair in zip(pipe.outputs, outputs_of(pipe, expected[last]), strict=True)]
    for stage, got, want in inner + outer:
        assert not got.isnan().any(), f"stage {stage} left elements unwritten on {got.device}"
        assert torch.equal(want.to(got.device), got), f"stage {stage} differs from the oracle on {got.device}"


def on_every_device(pipe: Pipeline, x: torch.Tensor) -> list[torch.Tensor]:
    """x on each device of the first stage; the first one is x itself."""
    return [x, *(x.to(f"cuda:{part.device}") for part in pipe.placement.stages[0][1:])]


def assert_run(pipe: Pipeline, x: torch.Tensor) -> None:
    """Run eagerly, with outputs that are NaN before."""
    poison(pipe)
    pipe(x)
    pipe.synchronize()
    assert_equals_oracle(pipe, x)


def assert_runs(pipe: Pipeline, x: torch.Tensor, replays: int = 3) -> None:
    """Eagerly (x given once) and as a graph (x on every device), each with outputs that are NaN before."""
    assert_run(pipe, x)
    graph = pipe.capture(on_every_device(pipe, x))
    for _ in range(replays):
        poison(pipe)
        graph.replay()
        pipe.synchronize()
        assert_equals_oracle(pipe, x)


def assert_replays(pipe: Pipeline, x: torch.Tensor, replays: int = 1000, values: int = 8) -> None:
    """Every replay of a graph gives the oracle's output for what x's storage then holds."""
    given = on_every_device(pipe, x)
    inputs = [torch.randn_like(x) for _ in range(values)]
    expected = [outputs_of(pipe, pipe.oracle(v)[-1]) for v in inputs]
    graph = pipe.capture(given)
    wrong = [torch.zeros((), dtype=torch.int64, device=y.device) for y in pipe.outputs]
    for number in range(replays):
        for tensor in given:
            tensor.copy_(inputs[number % values])
        _synchronize(pipe)
        graph.replay()
        pipe.synchronize()
        for y, count, want in zip(pipe.outputs, wrong, expected[number % values], strict=True):
            count += (y != want).any()
    _synchronize(pipe)
    assert [count.item() for count in wrong] == [0] * len(wrong)


def _synchronize(pipe: Pipeline) -> None:
    for device in pipe.placement.devices:
        torch.cuda.synchronize(device)


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
