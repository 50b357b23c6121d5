"""Stages cut by columns on virtual devices: the oracle's bits on every copy, whatever is cut where."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.runtime.pipelines import Make, biases_of, check, differences, misbehave, poison, weights_of, wrong, x_of
from tilerelay import InvalidInput, PipelineAborted, Placement, ShapeError, dense_chain, sharded
from tilerelay.graph.placement import Part
from tilerelay.kernels.protocol import EVENTS, OBTAINED, PUBLISHED

TILE = (64, 64)
TWO = [64, 136, 72]
THREE = [64, 136, 104, 72]
LEFT_RIGHT = (Part(0, None, (0, 64)), Part(1, None, (64, 136)))


def chain(m: int = 130, widths: list[int] = TWO, **options: Any):  # type: ignore[no-untyped-def]
    return dense_chain(m, widths, tile=TILE, **options)


@pytest.mark.parametrize("replicate", [False, True])
@pytest.mark.parametrize(
    ("devices", "m", "widths"),
    [(1, 130, TWO), (2, 130, TWO), (2, 1, TWO), (2, 64, THREE), (3, 65, TWO), (3, 130, THREE)],
)
def test_a_sharded_chain_equals_the_oracle_bit_for_bit(
    make: Make, devices: int, m: int, widths: list[int], replicate: bool
) -> None:
    """Uneven parts: 136 columns are 17 units of eight."""
    pipeline = make(chain(m, widths), placement=sharded(widths[1:], range(devices)), replicate=replicate)
    check(pipeline)
    assert len(pipeline.outputs) == devices
    columns = (
        [widths[-1]] * devices if replicate else [p.columns[1] - p.columns[0] for p in pipeline.placement.stages[-1]]
    )
    assert [list(y.shape) for y in pipeline.outputs] == [[m, n] for n in columns]
    last = len(widths) - 2
    copies = [(stage, device) for stage in range(last) for device in range(devices)]
    assert sorted(pipeline._run.tensors) == sorted([*copies, *((last, device) for device in range(devices))])
    assert len(pipeline.intermediates) == last * devices


@pytest.mark.parametrize(
    "placement",
    [
        Placement((LEFT_RIGHT, (Part(2, None, (0, 40)), Part(3, None, (40, 72))))),
        Placement((LEFT_RIGHT, (Part(1, None, (0, 8)), Part(0, None, (8, 72))))),
        Placement((LEFT_RIGHT, (Part(2),))),
        Placement((LEFT_RIGHT, (Part(1, None, (0, 72)),))),
        Placement(((Part(2),), (Part(0, None, (0, 40)), Part(1, None, (40, 72))))),
        Placement(((Part(1, None, (0, 136)),), (Part(0, None, (0, 40)), Part(1, None, (40, 72))))),
    ],
    ids=[
        "other devices",
        "other sides",
        "then whole elsewhere",
        "then whole on one",
        "whole, then cut",
        "one, then two",
    ],
)
def test_stages_that_are_cut_differently(make: Make, placement: Placement) -> None:
    check(make(chain(), placement=placement, signalling="counter"))


@pytest.mark.parametrize(
    ("dtype", "activation", "replicate"), [("bf16", "silu", True), ("fp16", "gelu", False), ("bf16", "relu", False)]
)
def test_biases_and_activations(make: Make, dtype: str, activation: str, replicate: bool) -> None:
    """The oracle is one device with the whole bias; that it agrees with torch, other tests show."""
    workload = chain(dtype=dtype, activation=activation, bias=True)
    pipeline = make(workload, biases=biases_of(workload), placement=sharded(TWO[1:], [0, 1]), replicate=replicate)
    check(pipeline)


def test_one_counter_for_every_tile(make: Make) -> None:
    check(make(chain(grouped=False), placement=sharded(TWO[1:], [0, 1])))


@pytest.mark.parametrize("first_epoch", [2**30 - 2, 2**31 - 2, 2**32 - 2])
def test_epochs_wrap(make: Make, first_epoch: int) -> None:
    """A tile of each device makes a group, so that the shared counter changes its sign in epochs 2^30 and 2^31."""
    widths = [64, 128, 72]
    check(make(chain(widths=widths), placement=sharded(widths[1:], [0, 1]), first_epoch=first_epoch), 4)


def test_weights_and_inputs_may_be_given_in_parts_or_whole(make: Make) -> None:
    workload, placement = chain(bias=True), sharded(TWO[1:], [0, 1])
    weights, biases = weights_of(workload), biases_of(workload)
    cuts = [[slice(*part.columns) for part in parts] for parts in placement.stages]
    pieces = [[w[rows] for rows in cut] for w, cut in zip(weights, cuts, strict=True)]
    bias_pieces = [[b[rows].clone() for rows in cut] for b, cut in zip(biases, cuts, strict=True)]
    whole = make(workload, weights=weights, biases=biases, placement=placement)
    in_parts = make(workload, weights=pieces, biases=bias_pieces, placement=placement)
    mixed = make(workload, weights=[weights[0], pieces[1]], biases=[bias_pieces[0], biases[1]], placement=placement)
    x = x_of(workload, 0)
    results = [[y.clone() for y in pipeline(x)] for pipeline in (whole, in_parts, mixed)]
    results.append([y.clone() for y in whole([x, x.clone()])])
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))
    assert not wrong(mixed, x)
    pieces[0][1].mul_(-2)  # a part's own weights may be changed in place
    check(in_parts, 1)
    assert not torch.equal(in_parts([x, x])[0], results[0][0])


def test_describe_says_what_runs(make: Make) -> None:
    pipeline = make(chain(), placement=sharded(TWO[1:], [0, 1]), replicate=True)
    assert pipeline.describe() == {
        "backend": "cpu",
        "devices": [0, 1],
        "placement": "sharded: 0[0:64]+1[64:136],0[0:32]+1[32:72]",
        "replicate": True,
        "signalling": "counter",
        "kernel": "classical",
        "tile": [[64, 64, 64], [64, 64, 64]],
        "shares_sums": [False, False],
        "sends_in_turn": [False, False],
    }


def test_an_output_that_is_cut_has_no_y(make: Make) -> None:
    pipeline = make(chain(), placement=sharded(TWO[1:], [0, 1]))
    assert isinstance(pipeline(x_of(pipeline.workload, 0)), list)
    with pytest.raises(InvalidInput, match="cut by columns over several devices; use outputs, or replicate=True"):
        _ = pipeline.y
    for whole in (
        make(chain(), placement=sharded(TWO[1:], [0, 1]), replicate=True),
        make(chain(), placement=sharded(TWO[1:], [0])),
    ):
        y = whole(x_of(pipeline.workload, 0))
        assert isinstance(y, torch.Tensor) and y is whole.y and y.shape == (130, 72)


def test_timestamps_show_that_parts_overlap(make: Make) -> None:
    """A device goes on to the next stage while its peer is still at the one before."""
    pipeline = make(chain(320), placement=sharded(TWO[1:], [0, 1]), trace=True)
    check(pipeline, 1)
    misbehave(pipeline, 1, "slow_tiles", 0.02)
    check(pipeline, [3])
    stamps = pipeline.stamps
    tiles = [stage.grid.tiles for stage in pipeline._cut.workload.stages]
    assert [list(stamps[part].shape) for part in range(4)] == [[n, EVENTS.value] for n in tiles]
    assert int(stamps[2][:, OBTAINED.value].min()) < int(stamps[1][:, PUBLISHED.value].max())
    for edge in pipeline._cut.workload.edges:
        for tile, group in enumerate(edge.dependencies.group_of):
            needed = stamps[edge.producer][edge.dependencies.prerequisites_of(int(group)), 0]
            assert int(stamps[edge.consumer][tile, OBTAINED.value]) > int(needed.max())


# Runs that go wrong


def test_a_device_that_does_not_wait_is_seen(make: Make) -> None:
    """The negative control: without its waits a device reads what its slow peer has not made yet."""
    pipeline = make(chain(256), placement=sharded(TWO[1:], [0, 1]))
    x = x_of(pipeline.workload, 0)
    poison(pipeline)
    misbehave(pipeline, 0, "slow_tiles", 0.05)
    misbehave(pipeline, 1, "skip_waits")
    pipeline(x)
    assert (1, 1) in differences(pipeline, x) and bool(pipeline.outputs[1].isnan().any())
    check(pipeline)


def test_a_device_that_does_not_come_is_named_and_the_next_run_is_right(make: Make) -> None:
    """Device 0 waits for panel 0: its own tile is there, those of the other device are not."""
    pipeline = make(chain(), placement=sharded(TWO[1:], [0, 1]), timeout_s=2.0)
    check(pipeline, 1)
    misbehave(pipeline, 1, "wait_for_abort")
    with pytest.raises(PipelineAborted) as caught:
        pipeline(x_of(pipeline.workload, 0))
    assert caught.value.waits == [
        "stage 1 (layer1[0:32]) on device 0 waited for tile 0 in run 2; "
        "2 of layer0[64:136]'s tiles had not been published: 0, 1"
    ]
    check(pipeline)


@pytest.mark.parametrize("loser", [0, 1])
def test_a_lost_tile_is_named_by_its_part(make: Make, loser: int) -> None:
    """Both readers of the panel, a tile each, wait for it; the one that gives up first ends the run for both."""
    pipeline = make(chain(192), placement=sharded(TWO[1:], [0, 1]), timeout_s=2.0)
    misbehave(pipeline, loser, "lose_publish", 2)
    with pytest.raises(PipelineAborted) as caught:
        pipeline(x_of(pipeline.workload, 0))
    name, panel = [("layer0[0:64]", 2), ("layer0[64:136]", 1)][loser]
    for line in caught.value.waits:
        assert line.startswith("stage 1 (layer1[")
        assert f"waited for tile {panel} in run 1" in line
        assert line.endswith(f"1 of {name}'s tiles had not been published: 2")
    check(pipeline)


# What cannot work


def bad(message: str, error: type[Exception] = ShapeError, **options: Any):  # type: ignore[no-untyped-def]
    return pytest.param(options, error, message, id=message)


W, B = weights_of(chain()), biases_of(chain())
SHARDED = sharded(TWO[1:], [0, 1])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        bad("weight of layer0: 1 pieces for 2 parts; give one for each, or the whole", weights=[[W[0]], W[1]]),
        bad("weights holds a list; give tensors, or lists", InvalidInput, weights=[[], W[1]]),
        bad("weight of layer1: 3 pieces for 2 parts", weights=[W[0], [W[1]] * 3]),
        bad(r"weight of layer0\[64:136\] has shape \[64, 64\], needs \[72, 64\]", weights=[[W[0][:64]] * 2, W[1]]),
        bad(r"weight of layer0 has shape \[128, 64\], needs \[136, 64\]", weights=[W[0][:128], W[1]]),
        bad(r"layer0\[0:64\] is on meta, its stage on cpu", weights=[[W[0][:64].to("meta"), W[0][64:]], W[1]]),
        bad(r"weight of layer0\[0:64\] is not contiguous", weights=[[W[0][:64].T.contiguous().T, W[0][64:]], W[1]]),
        bad("weight of layer0 is torch.float16, the workload is .*; convert it", weights=[W[0].half(), W[1]]),
        bad("1 weights for 2 stages", weights=[W[0]]),
        bad("layer0.*the workload says bias=False, but a bias is given", biases=B),
        bad("bias of layer1: 1 pieces for 2 parts", biases=[B[0], [B[1]]]),
        bad("2 stages are placed, the workload has 3", InvalidInput, widths=THREE),
        bad("has several readers; use signalling='counter'", InvalidInput, signalling="queue"),
        bad("stage 0: the columns .* are not all of the stage's", InvalidInput, widths=[64, 128, 72]),
        bad("hold_back waits for a queue's first entry", InvalidInput, hold_back=True),
        bad(
            "replicate keeps an output whole that is cut by columns; this one is not cut", InvalidInput,
            placement=Placement((LEFT_RIGHT, (Part(2),))), replicate=True,
        ),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(make: Make, options: dict[str, Any], error: type[Exception], message: str) -> None:
    workload = chain(widths=options.pop("widths", TWO))
    with pytest.raises(error, match=message):
        make(workload, **({"placement": SHARDED} | options))


def test_inputs_that_do_not_fit_are_refused(make: Make) -> None:
    pipeline = make(chain(), placement=SHARDED)
    x = x_of(pipeline.workload, 0)
    for given, message in [
        ([x, x, x], "x is given 3 times; give it once, or on each of 2 devices"),
        ([x, x[:64]], r"x has shape \[64, 64\], needs \[130, 64\]"),
        ([x, x.half()], "x is torch.float16, the workload is .*; convert it"),
        ([x, x.to("meta")], "x is on meta, its stage on cpu"),
    ]:
        with pytest.raises(ShapeError, match=message):
            pipeline(given)
    check(pipeline, 1)
