"""Sums that two CTAs share have the bits of whole ones, and a sum that is not handed over is noticed."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.cases import NAN, assert_replays, assert_run, assert_runs, make, poison
from tilerelay import Pipeline, PipelineAborted, dense_chain, sharded
from tilerelay.runtime.tracing import trace_run

WIDE = 128 * 112  # columns: with 512 rows 1.7 waves of 128 x 256 tiles on an H200, so that its sums are shared
devices = pytest.mark.parametrize("gpus", [1, 2])


def thin(
    gpus: int, k: int = 512, m: int = 512, *, widths: int = 2, tile: tuple[int, int] = (128, 256), **options: object
) -> tuple[Pipeline, torch.Tensor]:
    """A chain whose stages have thin waves on every device."""
    dtype, chain = options.pop("dtype", "bf16"), {"bias": True, "activation": "gelu"} if options.pop("act", 0) else {}
    columns = [WIDE * gpus] * widths
    workload = dense_chain(m, [k, *columns], tile=tile, dtype=dtype, **chain)  # type: ignore[arg-type]
    pipe, x = make(workload, sharded(columns, range(gpus)), **options)
    assert all(stage.walk for stage in pipe._cut.workload.stages), "no walk: another number of SMs?"
    return pipe, x


@pytest.mark.usefixtures("every_way")
@devices
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("m", [512, 1000, 1024])
def test_rows(gpus: int, m: int, dtype: str) -> None:
    pipe, x = thin(gpus, m=m, dtype=dtype)
    with pipe:
        assert_runs(pipe, x)


@devices
@pytest.mark.parametrize("tile", [(128, 256), (128, 128), (256, 128)])
def test_tiles(gpus: int, tile: tuple[int, int]) -> None:
    pipe, x = thin(gpus, m=512 if tile == (128, 128) else 512 * 2, tile=tile, widths=1)
    with pipe:
        assert_runs(pipe, x)


@devices
@pytest.mark.parametrize("k", [128, 192, 1024, 1000])
def test_k_blocks(gpus: int, k: int) -> None:
    pipe, x = thin(gpus, k, widths=1)
    with pipe:
        assert_runs(pipe, x)


@devices
@pytest.mark.parametrize("layers", ["thin, full", "full, thin", "thin, full, thin"])
def test_segments_with_and_without_shared_sums(gpus: int, layers: str) -> None:
    columns = [{"thin": WIDE, "full": 4096}[layer] * gpus for layer in layers.split(", ")]
    workload = dense_chain(512, [512, *columns])
    pipe, x = make(workload, sharded(columns, range(gpus)))
    with pipe:
        assert {stage.walk is not None for stage in pipe._cut.workload.stages} == {True, False}
        assert_runs(pipe, x)


@pytest.mark.parametrize("first_epoch", [2**31 - 3, 2**32 - 3])
def test_epochs_wrap(first_epoch: int) -> None:
    pipe, x = thin(1, first_epoch=first_epoch)
    with pipe:
        for run in range(8):
            x.add_(run)
            assert_run(pipe, x)


def test_a_trace_has_every_tile_in_order() -> None:
    """A tile's events are those of the CTA that ends its sum."""
    pipe, x = thin(1, 2048, trace=True)
    with pipe:
        trace = trace_run(pipe, x)
        assert trace.backward == 0
        assert len(trace.keys) == 2 * 4 * WIDE // 256


@devices
def test_bias_and_activation(gpus: int) -> None:
    pipe, x = thin(gpus, act=1)
    with pipe:
        assert_runs(pipe, x)


@devices
def test_a_thousand_replays(gpus: int) -> None:
    pipe, x = thin(gpus, widths=1)
    with pipe:
        assert_replays(pipe, x)


def _field(pipe: Pipeline, name: str) -> torch.Tensor:
    return pipe._run.workspace.stage(0, name)


def _leave_out_first_pieces(pipe: Pipeline, k: int) -> None:
    pieces = _field(pipe, "pieces").view(-1, 3)
    first = (pieces[:, 0] == 0) & (pieces[:, 1] > 0) & (pieces[:, 1] < k)
    assert first.any()
    pieces[first] = 0


def test_a_sum_that_is_not_waited_for_is_seen() -> None:
    """Negative control: sums that nobody begins, but that seem to have been handed over."""
    pipe, x = thin(1, widths=1)
    with pipe:
        poison(pipe)
        _field(pipe, "sums").fill_(NAN)
        _leave_out_first_pieces(pipe, 512)
        _field(pipe, "given").fill_(100)
        pipe(x)
        pipe.synchronize()
        assert pipe.y.isnan().any()


def test_a_sum_that_is_not_handed_over_ends_the_run() -> None:
    pipe, x = thin(1, widths=1, timeout_s=0.2)
    with pipe:
        _leave_out_first_pieces(pipe, 512)
        pipe(x)
        with pytest.raises(PipelineAborted, match="the first piece of its sum had not been handed over"):
            pipe.synchronize()
        for _ in range(2):
            assert_run(pipe, x)
