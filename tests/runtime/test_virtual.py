"""Pipelines on virtual devices: right results, real concurrency, and runs that end whatever goes wrong."""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.runtime.pipelines import Make, check, misbehave, poison, wrong, x_of
from tilerelay import InvalidInput, PipelineAborted, Placement, TilerelayError, dense_chain
from tilerelay.graph.tiling import permutation_order
from tilerelay.graph.workload import Stage, chain
from tilerelay.kernels.protocol import COMPUTED, OBTAINED, PUBLISHED, SEEN, STORED
from tilerelay.runtime import virtual
from tilerelay.runtime.oracle import TORCH_DTYPES
from tilerelay.runtime.virtual_workers import Workers

TILE = (64, 64)


@pytest.mark.parametrize("signalling", ["queue", "counter"])
@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_chain_of_three_equals_the_oracle_bit_for_bit(make: Make, signalling: str, grouped: bool, dtype: str) -> None:
    workload = dense_chain(200, [128, 136, 192, 64], tile=TILE, dtype=dtype, grouped=grouped)
    check(make(workload, signalling=signalling))


@pytest.mark.parametrize("signalling", ["queue", "counter"])
@pytest.mark.parametrize("m", [1, 63, 64, 65, 100])
def test_ragged_rows_and_layers_of_one_tile(make: Make, m: int, signalling: str) -> None:
    check(make(dense_chain(m, [64, 64, 64], tile=TILE), signalling=signalling))


def test_layers_narrower_than_a_tile(make: Make) -> None:
    check(make(dense_chain(70, [40, 24, 72], tile=TILE)))


def test_stages_with_different_tiles(make: Make) -> None:
    """One panel of the consumer needs two of the producer, and the other way round."""
    shapes = [(64, 64), (128, 32), (64, 128)]
    widths = [64, 128, 96, 128]
    whole = [dense_chain(300, widths, tile=tile) for tile in shapes]
    check(make(chain([whole[i].stages[i] for i in range(3)])))


def test_any_order_of_the_first_stages_tiles(make: Make) -> None:
    """The queue hands on the order in which panels become complete."""
    first, second = dense_chain(256, [64, 128, 64], tile=TILE).stages
    order = permutation_order(first.grid, np.random.default_rng(3).permutation(first.grid.tiles))
    check(make(chain([Stage(first.name, first.grid, first.k, order=order), second])))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("activation", ["none", "relu", "gelu", "silu"])
def test_bias_and_activation_agree_with_torch(make: Make, activation: str, dtype: str) -> None:
    workload = dense_chain(65, [64, 72, 64], tile=TILE, dtype=dtype, activation=activation, bias=True)
    generator = torch.Generator().manual_seed(7)
    biases = [torch.randn(s.grid.n, generator=generator).to(TORCH_DTYPES[dtype]) for s in workload.stages]
    pipeline = make(workload, biases=biases)
    poison(pipeline)
    x = x_of(workload, 0)
    y = pipeline(x)
    function = {"none": lambda t: t, "relu": F.relu, "gelu": F.gelu, "silu": F.silu}[activation]
    # fp32, rounded once: the kernel may differ in the last bit where its sum has another order.
    hidden = function(x.float() @ pipeline._weights[0].float().T + biases[0].float())
    step = torch.finfo(TORCH_DTYPES[dtype]).eps
    torch.testing.assert_close(pipeline.intermediates[0].float(), hidden, rtol=step, atol=step / 16)
    expected = pipeline.intermediates[0].float() @ pipeline._weights[1].float().T + biases[1].float()
    torch.testing.assert_close(y.float(), expected, rtol=step, atol=step / 16)


@pytest.mark.parametrize("signalling", ["queue", "counter"])
@pytest.mark.parametrize("first_epoch", [2**30 - 2, 2**31 - 2, 2**32 - 2])
def test_epochs_wrap(make: Make, first_epoch: int, signalling: str) -> None:
    """A group needs two tiles, so that its counter changes its sign in epochs 2^30 and 2^31."""
    pipeline = make(dense_chain(130, [64, 128, 64], tile=TILE), signalling=signalling, first_epoch=first_epoch)
    check(pipeline, 4)
    low = pipeline._run.workspace.stage(1, "epoch").item() % 2**32
    assert low == (first_epoch + 4) % 2**32 == pipeline._run.epoch % 2**32


@pytest.mark.parametrize("grouped", [True, False])
def test_the_ring_wraps(make: Make, grouped: bool) -> None:
    """Three entries (or, by tiles, six) in a ring of four (eight): every run starts at another slot."""
    pipeline = make(dense_chain(130, [64, 64, 128], tile=TILE, grouped=grouped), signalling="queue")
    check(pipeline, 5)
    ring = pipeline._run.workspace.edge(0, "ring")
    entries = 3 if grouped else 6
    assert (len(ring), pipeline._run.workspace.edge(0, "tail").item()) == (4 if grouped else 8, 5 * entries)


def test_one_thread_at_a_time(make: Make) -> None:
    workload = dense_chain(70, [40, 24, 72], tile=TILE)
    pipeline, x = make(workload), x_of(workload, 0)
    with pipeline._alone, pytest.raises(InvalidInput, match="another thread"):
        pipeline(x)
    pipeline(x)


@pytest.mark.parametrize("use", ["synchronize", "close"])
def test_what_ends_runs_waits_for_the_thread_that_launches_one(make: Make, use: str) -> None:
    pipeline = make(dense_chain(70, [40, 24, 72], tile=TILE))
    other = threading.Thread(target=getattr(pipeline, use))
    with pipeline._alone:
        other.start()
        other.join(0.05)
        assert other.is_alive() and not pipeline._closed
    other.join()


def test_two_stages_of_one_device_with_another_between(make: Make) -> None:
    pipeline = make(dense_chain(130, [64, 64, 64, 64], tile=TILE), placement=Placement.parse("0:66,1:66,0:66"))
    check(pipeline)


def test_weights_may_be_changed_in_place(make: Make) -> None:
    pipeline = make(dense_chain(64, [64, 64], tile=TILE))
    check(pipeline, 1)
    pipeline._weights[0].mul_(-2)
    check(pipeline, 1)


# Concurrency


@pytest.mark.parametrize("signalling", ["queue", "counter"])
@pytest.mark.parametrize("slow", [0, 1])
def test_a_consumer_starts_while_its_producer_runs(make: Make, slow: int, signalling: str) -> None:
    """Whichever side is slow, tiles of both are under way at the same time, and none before its prerequisites."""
    pipeline = make(dense_chain(320, [64, 128, 64], tile=TILE), signalling=signalling, trace=True)
    check(pipeline, 1)  # both sides are warm
    before = time.monotonic_ns()
    misbehave(pipeline, slow, "slow_tiles", 0.03)
    check(pipeline, [5])
    producer, consumer = pipeline.stamps[0], pipeline.stamps[1]
    events = [event.value for event in (SEEN, OBTAINED, COMPUTED, STORED, PUBLISHED)]
    for stamps in (producer, consumer):
        assert bool((stamps[:, events].diff(dim=1) >= 0).all()) and bool((stamps[:, SEEN.value] > before).all())
    assert int(consumer[:, OBTAINED.value].min()) < int(producer[:, PUBLISHED.value].max())
    edge = pipeline.workload.edges[0].dependencies
    for tile in range(edge.num_consumers):
        needed = producer[edge.prerequisites_of(int(edge.group_of[tile])), STORED.value]
        assert int(consumer[tile, SEEN.value]) > int(needed.max())


@pytest.mark.parametrize("signalling", ["queue", "counter"])
def test_a_consumer_that_does_not_wait_is_seen(make: Make, signalling: str) -> None:
    """The negative control of all comparisons above: without its waits the consumer reads NaN, or forgets tiles."""
    pipeline = make(dense_chain(256, [64, 64, 64], tile=TILE), signalling=signalling)
    x = x_of(pipeline.workload, 0)
    poison(pipeline)
    misbehave(pipeline, 0, "slow_tiles", 0.05)
    misbehave(pipeline, 1, "skip_waits")
    y = pipeline(x)
    assert bool(y.isnan().any()) and wrong(pipeline, x)
    check(pipeline)


# Runs that go wrong


@pytest.mark.parametrize("signalling", ["queue", "counter"])
def test_a_producer_that_does_not_come_is_named_and_the_next_run_is_right(make: Make, signalling: str) -> None:
    pipeline = make(dense_chain(130, [64, 128, 64], tile=TILE), signalling=signalling, timeout_s=2.0)
    check(pipeline, 2)
    misbehave(pipeline, 0, "wait_for_abort")
    with pytest.raises(PipelineAborted) as caught:
        pipeline(x_of(pipeline.workload, 0))
    (line,) = caught.value.waits
    waited_for, missing = {
        "queue": ("the next tile of its queue (ticket 0)", [0, 1, 2, 3, 4, 5]),
        "counter": ("tile 0", [0, 1]),
    }[signalling]
    assert line == (
        f"stage 1 (layer1) on device 1 waited for {waited_for} in run 3; {len(missing)} of layer0's tiles "
        f"had not been published: {', '.join(map(str, missing))}"
    )
    check(pipeline, 2)


@pytest.mark.parametrize("signalling", ["queue", "counter"])
def test_a_lost_tile_is_named(make: Make, signalling: str) -> None:
    pipeline = make(dense_chain(192, [64, 128, 64, 64], tile=TILE), signalling=signalling, timeout_s=2.0)
    misbehave(pipeline, 0, "lose_publish", 3)
    misbehave(pipeline, 2, "slow_tiles", 0.2)  # so that stage 1 gives up first
    with pytest.raises(PipelineAborted, match=r"stage 1 \(layer1\) on device 1 .* 1 of layer0's tiles .*: 3"):
        pipeline(x_of(pipeline.workload, 0))
    check(pipeline, 2)


def test_a_stage_that_raises_is_named_and_the_next_run_is_right(make: Make) -> None:
    pipeline = make(dense_chain(130, [64, 64, 64, 64], tile=TILE), timeout_s=60.0)
    check(pipeline, 1)
    misbehave(pipeline, 1, "fail")
    with pytest.raises(TilerelayError, match=r"(?s)^stage 1 \(layer1\) on virtual device 1: .*one over nothing"):
        pipeline(x_of(pipeline.workload, 0))
    check(pipeline, 2)


def test_what_cannot_work_is_refused(make: Make) -> None:
    with pytest.raises(InvalidInput, match="4 workers for 5 virtual devices"):
        make(dense_chain(64, [64] * 6, tile=TILE))
    with pytest.raises(InvalidInput, match="hold_back"):
        virtual.VirtualPipeline(*[None] * 5, timeout_us=1, hold_back=True)  # type: ignore[arg-type]


def test_stamps_are_kept_only_when_wanted_and_cleared_by_a_reset(make: Make) -> None:
    pipeline = make(dense_chain(64, [64, 64, 64], tile=TILE))
    check(pipeline, 1)
    with pytest.raises(InvalidInput, match="trace=True"):
        _ = pipeline.stamps
    pipeline = make(dense_chain(64, [64, 64, 64], tile=TILE), trace=True)
    check(pipeline, 1)
    assert all(int(stamps.max()) > 0 for stamps in pipeline.stamps.values())
    pipeline._run.reset()
    assert all(int(stamps.max()) == 0 for stamps in pipeline.stamps.values())


def test_workers_have_no_more_threads_than_they_need(workers: Workers) -> None:
    """Products are summed in one order; two threads each: the interpreter and the one that watches the parent."""
    assert [len(os.listdir(f"/proc/{pid}/task")) for pid in workers.pids] == [2] * 4
