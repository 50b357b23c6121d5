"""Tiles that are sent in turn, and sums that begin before all of their inputs are there, give the oracle's bits."""

from __future__ import annotations

import pytest

from tests.gpu.cases import assert_replays, assert_runs, make
from tilerelay import PipelineAborted, Placement, dense_chain, pipelined, sharded
from tilerelay.graph.placement import Part
from tilerelay.protocol.layout import STAGE_NUMBERS
from tilerelay.runtime.pipeline import Pipeline


def in_turn(pipe: Pipeline) -> list[int]:
    """The parts whose tiles are sent in turn."""
    return [part for part, stage in enumerate(pipe._cut.workload.stages) if stage.under_way]


def steps(pipe: Pipeline) -> set[int]:
    return {edge.dependencies.num_steps for edge in pipe._cut.workload.edges}


@pytest.mark.parametrize("m", [1, 127, 512, 1000])
@pytest.mark.parametrize("replicate", [False, True])
@pytest.mark.parametrize("tile", [(128, 256), (128, 128), (64, 256)], ids=lambda tile: f"{tile[0]}x{tile[1]}")
def test_a_single_wave(m: int, replicate: bool, tile: tuple[int, int]) -> None:
    widths = [256, 2048, 1032, 520]
    pipe, x = make(dense_chain(m, widths, tile=tile), sharded(widths[1:], [0, 1]), replicate=replicate)
    with pipe:
        assert in_turn(pipe) == [0, 1, 2, 3] and steps(pipe) == {4}
        assert_runs(pipe, x)


@pytest.mark.parametrize("waves", [1, 2, 7])
@pytest.mark.parametrize("bias", [False, True])
def test_pipelined_stages(waves: int, bias: bool) -> None:
    """Readers that run at the same time; 1032 columns are five tiles, the last one ragged."""
    workload = dense_chain(waves * 26 * 128, [512, 1032, 520], bias=bias, activation="silu")
    pipe, x = make(workload, pipelined([0, 1]))
    with pipe:
        assert in_turn(pipe) == [0] and steps(pipe) == {4}
        assert_runs(pipe, x)


def test_steps_that_end_inside_a_tile_and_parts_without_some_steps() -> None:
    uneven = (Part(0, None, (0, 1000)), Part(1, None, (1000, 2048)))
    pipe, x = make(dense_chain(700, [256, 2048, 512]), Placement((uneven, (Part(0, None, (0, 512)),))))
    with pipe:
        assert in_turn(pipe) == [1], "device 0 alone reads"
        assert_runs(pipe, x)


def test_steps_of_sums_that_are_shared() -> None:
    """The second stage's tiles are not quite two waves: its CTAs share sums."""
    widths = [256, 4096, 28672]
    pipe, x = make(dense_chain(512, widths), sharded(widths[1:], [0, 1]))
    with pipe:
        assert in_turn(pipe) == [0, 1] and pipe.describe()["shares_sums"] == [False, True]
        assert_runs(pipe, x)


@pytest.mark.parametrize("placement", [sharded([4096, 1024], [0, 1]), pipelined([0, 1])], ids=lambda p: p.kind)
def test_a_thousand_replays_across_the_wrap_of_the_epoch(placement: Placement) -> None:
    pipe, x = make(dense_chain(512, [512, 4096, 1024]), placement, first_epoch=2**31 - 500)
    with pipe:
        assert in_turn(pipe)
        assert_replays(pipe, x)


def test_a_turn_that_does_not_come_is_named_and_the_next_run_is_right() -> None:
    """Each tile is made to wait until it has been sent itself."""
    pipe, x = make(dense_chain(512, [256, 2048, 512]), sharded([2048, 512], [0, 1]), timeout_s=0.2)
    with pipe:
        pipe._run.workspace.stage(0, "numbers")[STAGE_NUMBERS.index("under_way")] = 0  # type: ignore[union-attr]
        pipe(x)
        with pytest.raises(PipelineAborted, match="waited to send tile") as caught:
            pipe.synchronize()
        assert any("layer0[0:1024]" in line and "had not been sent before" in line for line in caught.value.waits)
        assert_runs(pipe, x)
