"""Runs and what surrounds them: readers on other devices, other pipelines, launches that break off."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import pytest
import torch

from tests.gpu.cases import assert_equals_oracle, assert_run, make, on_every_device, outputs_of
from tilerelay import InvalidInput, Pipeline, Placement, dense_chain, sharded

WIDTHS = [1024, 2048, 1024]


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("placement", ["0,1", "1,0", "sharded"])
def test_the_output_can_be_read_at_once(placement: str, graph: bool) -> None:
    """Readers on each device's current stream come after the run, and the next run after the readers."""
    placed = sharded(WIDTHS[1:], [0, 1]) if placement == "sharded" else Placement.parse(placement)
    pipe, x = make(dense_chain(8000, WIDTHS), placed)
    inputs = [torch.randn_like(x) for _ in range(2)]
    with pipe:
        expected = [pipe.oracle(value)[-1].clone() for value in inputs]
        replay = pipe.capture(x).replay if graph else lambda: pipe(x)
        for run in range(10):
            x.copy_(inputs[run % 2])
            replay()
            copies = [output.clone() for output in pipe.outputs]
            whole = torch.cat([copy.to(x.device) for copy in copies], dim=1)
            assert torch.equal(whole, expected[run % 2])


@pytest.mark.parametrize("all_streams", [True, False])
def test_a_replay_follows_what_is_under_way_on_other_devices(all_streams: bool) -> None:
    """Input that comes late on the second device is waited for; without that (negative control) the old one is read."""
    pipe, x = make(dense_chain(1000, WIDTHS), sharded(WIDTHS[1:], [0, 1]))
    with pipe:
        given = on_every_device(pipe, x)
        graph = pipe.capture(given, all_streams=all_streams)
        fresh = [torch.randn_like(x)]
        fresh.append(fresh[0].to(given[1].device))
        expected = outputs_of(pipe, pipe.oracle(fresh[0])[-1])
        graph.replay()
        pipe.synchronize()
        with torch.cuda.device(1):
            torch.cuda._sleep(50_000_000)
        for tensor, value in zip(given, fresh, strict=True):
            tensor.copy_(value)
        graph.replay()
        pipe.synchronize()
        right = all(torch.equal(y, want) for y, want in zip(pipe.outputs, expected, strict=True))
        assert right == all_streams


def test_pipelines_that_share_devices_do_not_block_each_other() -> None:
    chain = dense_chain(3000, WIDTHS)
    pipes = [make(chain, Placement.parse(text), timeout_s=2.0) for text in ("0,1", "1,0")]
    pipes += [make(chain, sharded(WIDTHS[1:], [0, 1]), timeout_s=2.0) for _ in range(2)]
    streams = [torch.cuda.Stream(x.device) for _, x in pipes]
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)
    for _ in range(10):
        for (pipe, x), stream in zip(pipes, streams, strict=True):
            with torch.cuda.device(x.device), torch.cuda.stream(stream):
                pipe(x)
    for pipe, x in pipes:
        with pipe:
            pipe.synchronize()
            assert_equals_oracle(pipe, x)


def break_off(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let launches end after their first kernel."""
    launches = pipe._run.launches

    def broken(inputs: Sequence[torch.Tensor]) -> list[Callable[[], None]]:
        def fail() -> None:
            raise KeyboardInterrupt

        return [launches(inputs)[0], fail]

    monkeypatch.setattr(pipe._run, "launches", broken)


def test_a_launch_that_breaks_off_leaves_a_pipeline_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, x = make(dense_chain(3000, WIDTHS), Placement.parse("0,1"))
    with pipe:
        for _ in range(2):
            with monkeypatch.context() as patched:
                break_off(pipe, patched)
                with pytest.raises(KeyboardInterrupt):
                    pipe(x)
            assert_run(pipe, x)


def test_a_launch_that_breaks_off_leaves_the_runs_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, x = make(dense_chain(8000, WIDTHS), Placement.parse("0,1"))
    with pipe:
        expected = pipe.oracle(x)[-1].to(pipe.y.device)
        before = pipe(x).clone()
        break_off(pipe, monkeypatch)
        with pytest.raises(KeyboardInterrupt):
            pipe(x)
        assert torch.equal(before, expected)


def test_a_pipeline_may_be_dropped_in_a_run() -> None:
    pipe, x = make(dense_chain(8000, WIDTHS), Placement.parse("0,1"))
    for _ in range(5):
        pipe(x)
    y = pipe.y
    expected = pipe.oracle(x)[-1].to(y.device)
    gone = weakref.ref(pipe._run)
    del pipe
    assert gone() is None and torch.equal(y, expected)


def test_not_in_a_capture_of_ones_own() -> None:
    pipe, x = make(dense_chain(300, WIDTHS), Placement.parse("0,1"))
    with pipe:
        stream = torch.cuda.Stream(0)
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream), pytest.raises(InvalidInput, match="capture"):
            pipe(x)
