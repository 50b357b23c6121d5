"""Many runs of one pipeline: changing inputs, graphs, delays, epochs at their wrap, aborts, a broken rule."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tests.gpu.cases import assert_run, make, poison
from tilerelay import Pipeline, PipelineAborted, Placement, dense_chain
from tilerelay.graph.tiling import TileGrid
from tilerelay.graph.workload import Stage, chain
from tilerelay.runtime import cuda_pipeline

placements = pytest.mark.parametrize("placement", ["0,1", "0:66,0:66"], ids=["two GPUs", "one GPU"])
DELAY_CYCLES = 2_000_000  # about a millisecond
INPUTS = 8


def two_stages(
    m: int = 512, width: int = 512, *, placement: str = "0,1", **options: Any
) -> tuple[Pipeline, torch.Tensor]:
    return make(dense_chain(m, [width] * 3), Placement.parse(placement), **options)


@pytest.mark.parametrize(
    ("kernel", "placement"), [("persistent", "0,1"), ("classical", "0,1"), ("persistent", "0:66,0:66")]
)
@pytest.mark.parametrize("signalling", ["queue", "counter"])
def test_a_thousand_replays(kernel: str, placement: str, signalling: str) -> None:
    pipe, x = two_stages(placement=placement, kernel=kernel, signalling=signalling)
    inputs = [torch.randn_like(x) for _ in range(INPUTS)]
    with pipe:
        expected = [pipe.oracle(value)[-1].to(pipe.y.device).clone() for value in inputs]
        graph = pipe.capture(x)
        wrong = torch.zeros((), dtype=torch.int64, device=pipe.y.device)
        for run in range(1000):
            x.copy_(inputs[run % INPUTS])
            graph.replay()
            torch.cuda.synchronize(x.device)
            wrong += (pipe.y != expected[run % INPUTS]).any()
            torch.cuda.synchronize(pipe.y.device)
        pipe.synchronize()
        assert wrong.item() == 0


@pytest.mark.parametrize("signalling", ["queue", "counter"])
@pytest.mark.parametrize("first_epoch", [2**31 - 3, 2**32 - 3])
@placements
def test_epochs_wrap(placement: str, first_epoch: int, signalling: str) -> None:
    pipe, x = two_stages(m=700, placement=placement, first_epoch=first_epoch, signalling=signalling)
    with pipe:
        for run in range(8):
            x.add_(run)
            assert_run(pipe, x)


def _delay(pipe: Pipeline, kernel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a delay before a kernel in every run."""
    launches = pipe._run.launches

    def delayed(x: Sequence[torch.Tensor]) -> list[Callable[[], None]]:
        made = list(launches(x))
        late = made[kernel]

        def run() -> None:
            torch.cuda._sleep(DELAY_CYCLES)
            late()

        made[kernel] = run
        return made

    monkeypatch.setattr(pipe._run, "launches", delayed)


def _change_pieces(
    pipe: Pipeline, x: torch.Tensor, part: int, monkeypatch: pytest.MonkeyPatch, **options: bool
) -> None:
    """Make one part's kernel deaf (listen=False) or mute (announce=False); compile it before anything runs."""
    make_piece = cuda_pipeline.make_piece

    def changed(workspace: Any, stage: int, *tensors: Any, **given: Any) -> Any:
        return make_piece(workspace, stage, *tensors, **given, **(options if stage == part else {}))

    monkeypatch.setattr(cuda_pipeline, "make_piece", changed)
    pipe._run._launches = ((), [])
    for stream, launch in zip(pipe._run._streams, pipe._run.launches([x]), strict=True):
        with cuda_pipeline.cuda.on(stream):
            launch.load()


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("signalling", ["queue", "counter"])
@placements
def test_either_side_late(placement: str, stage: int, signalling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, x = two_stages(m=2000, placement=placement, signalling=signalling)
    with pipe:
        _delay(pipe, stage, monkeypatch)
        for _ in range(3):
            x.neg_()
            assert_run(pipe, x)


@pytest.mark.parametrize("signalling", ["queue", "counter"])
@pytest.mark.parametrize("placement", ["0:1,1", "0,1:1", "0:2,1:131", "0:100,0:32"])
def test_either_side_slow(placement: str, signalling: str) -> None:
    """One SM against a whole device: every tile arrives late, or waits long to be read."""
    pipe, x = two_stages(m=1500, placement=placement, signalling=signalling)
    with pipe:
        assert_run(pipe, x)


@placements
def test_a_consumer_that_does_not_wait_is_seen(placement: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: without its prologue's wait the consumer reads what is not there yet."""
    pipe, x = two_stages(m=2000, placement=placement)
    with pipe:
        _change_pieces(pipe, x, 1, monkeypatch, listen=False)
        _delay(pipe, 0, monkeypatch)
        poison(pipe)
        pipe(x)
        pipe.synchronize()
        assert pipe.y.isnan().any()


@pytest.mark.parametrize(
    ("kernel", "placement"),
    [("persistent", "0:66,1,0:66"), ("classical", "0:66,1,0:66"), ("persistent", "0:44,0:44,0:44")],
)
@pytest.mark.parametrize("signalling", ["queue", "counter"])
@pytest.mark.parametrize("hold_back", [False, True])
def test_abort_names_who_waits_and_the_pipeline_goes_on(
    kernel: str, placement: str, signalling: str, hold_back: bool
) -> None:
    if hold_back and signalling == "counter":
        pytest.skip("only a queue has a first entry to wake a held-back stream")
    # Three stages: the last one must be released, too, when the middle one gives up.
    workload = dense_chain(1000, [512] * 4)
    kernels = ["persistent", kernel, "persistent"]
    pipe, x = make(
        workload, Placement.parse(placement), kernel=kernels, signalling=signalling, timeout_s=0.2, hold_back=hold_back
    )
    with pipe:
        with pytest.MonkeyPatch.context() as mute:
            _change_pieces(pipe, x, 0, mute, announce=False)
            pipe(x)
        with pytest.raises(PipelineAborted) as caught:
            pipe.synchronize()
        text = str(caught.value)
        assert "stage 1" in text and "layer0" in text and "tile" in text
        assert re.search(r"layer0's tiles had not been published: \d+", text)  # the missing producers by number
        pipe._run._launches = ((), [])
        for _ in range(2):
            assert_run(pipe, x)


@placements
def test_hold_back(placement: str) -> None:
    pipe, x = two_stages(m=1000, placement=placement, hold_back=True)
    with pipe:
        for _ in range(5):
            x.neg_()
            assert_run(pipe, x)


@pytest.mark.parametrize("placement", ["0:1,1:1", "0:1,0:1"])
def test_a_given_tile_order(placement: str) -> None:
    """The paper's pre-defined source queue: the first stage computes its tiles in any given order."""
    grids = [TileGrid(1000, 1024, 128, 256)] * 2
    backwards = list(range(grids[0].tiles))[::-1]
    workload = chain([Stage("first", grids[0], 512, order=backwards), Stage("last", grids[1], 1024)])
    pipe, x = make(workload, Placement.parse(placement))
    with pipe:
        assert pipe.signalling == "queue"
        assert_run(pipe, x)
        ring = pipe._run.workspace.edge(0, "ring").cpu()
        groups = (ring & 0xFFFFFFFF).tolist()
        # One SM: the panels become ready in the order of the source queue, last one first (after the dry run's pushes).
        assert groups[: len(groups)] == list(range(grids[0].rows))[::-1]
