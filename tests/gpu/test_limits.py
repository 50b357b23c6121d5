"""What a pipeline refuses on GPUs, and that nothing is left behind."""

from __future__ import annotations

import gc

import pytest
import torch

from tests.gpu.cases import make, needs
from tilerelay import InvalidInput, Pipeline, Placement, PlacementError, ShapeError, UnsupportedMachine, dense_chain

WORKLOAD = dense_chain(256, [128, 256, 128])


def refused(error: type[Exception], match: str, placement: str = "0,1", **options: object) -> None:
    needs(2)
    gc.collect()
    before = [torch.cuda.memory_allocated(d) for d in range(2)]
    weights = options.pop("weights", None)
    workload = options.pop("workload", WORKLOAD)
    with pytest.raises(error, match=match):
        if weights is None:
            make(workload, Placement.parse(placement), **options)  # type: ignore[arg-type]
        else:
            Pipeline(workload, weights, placement=Placement.parse(placement), **options)  # type: ignore[arg-type]
    gc.collect()
    assert [torch.cuda.memory_allocated(d) for d in range(2)] == before


def weights(**changes: torch.Tensor) -> list[torch.Tensor]:
    needs(2)
    first = torch.zeros(256, 128, dtype=torch.bfloat16, device="cuda:0")
    last = torch.zeros(128, 256, dtype=torch.bfloat16, device="cuda:1")
    return [changes.get("first", first), changes.get("last", last)]


def test_placements() -> None:
    refused(PlacementError, "add up to 200 SMs", "0:100,0:100")
    refused(PlacementError, "classical consumer on its producer's device", "0:66,0:66", kernel="classical")
    refused(PlacementError, "takes a whole device", "0:66,1:66", kernel="classical")
    refused(UnsupportedMachine, "does not exist", "0,7", weights=weights())


def test_launch_blocking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    refused(UnsupportedMachine, "CUDA_LAUNCH_BLOCKING")


def test_peers_that_cannot_reach_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilerelay.runtime import cuda

    cuda._open_way.cache_clear()
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: False)
    refused(UnsupportedMachine, "cannot write the memory of device")


def test_a_write_that_does_not_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilerelay.runtime import cuda

    class Dropped:
        def __getitem__(self, grid: object):  # type: ignore[no-untyped-def]
            return lambda *args: None

    cuda._open_way.cache_clear()
    monkeypatch.setattr(cuda, "_write_pattern", Dropped())
    refused(UnsupportedMachine, "did not arrive")


def test_tensors() -> None:
    wide = torch.zeros(256, 256, dtype=torch.bfloat16, device="cuda:0")
    refused(ShapeError, "not contiguous", weights=weights(first=wide[:, :128]))
    refused(ShapeError, "move it", weights=weights(last=torch.zeros(128, 256, dtype=torch.bfloat16, device="cuda:0")))
    refused(ShapeError, "has shape", weights=weights(first=wide))
    refused(ShapeError, "convert it", weights=weights(first=torch.zeros(256, 128, device="cuda:0")))


def test_tile_that_does_not_fit() -> None:
    refused(InvalidInput, "does not fit", workload=dense_chain(256, [128, 256, 128], tile=(256, 256)))


def _run_and_close() -> None:
    pipe, x = make(WORKLOAD, Placement.parse("0,1"))
    graph = pipe.capture(x)
    graph.replay()
    pipe.close()
    pipe.close()
    for use in (lambda: pipe(x), graph.replay, pipe.synchronize, lambda: pipe.capture(x)):
        with pytest.raises(InvalidInput, match="closed"):
            use()


def test_nothing_left_and_closed_means_closed() -> None:
    needs(2)
    _run_and_close()  # whatever torch and Triton keep for themselves is there now
    gc.collect()
    before = [torch.cuda.memory_allocated(d) for d in range(2)]
    _run_and_close()
    gc.collect()
    assert [torch.cuda.memory_allocated(d) for d in range(2)] == before


def test_hold_back_is_refused_in_graphs() -> None:
    pipe, x = make(WORKLOAD, Placement.parse("0,1"), hold_back=True)
    with pipe, pytest.raises(InvalidInput, match="eager runs only"):
        pipe.capture(x)
