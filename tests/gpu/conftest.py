"""GPU tests: each is skipped, and says so, on a machine with fewer Hopper GPUs than it names (see cases.needs)."""

import os

os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")

import pytest
import torch

from tilerelay.graph.workload import Stage
from tilerelay.kernels.relay import BULK, RELAY, RELAY_BUT_LAST
from tilerelay.runtime import cuda_pipeline


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/gpu" in str(item.path):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(autouse=True)
def _hopper_gpu() -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability(0) != (9, 0):
        pytest.skip("needs a Hopper GPU")


@pytest.fixture(params=["as chosen", "bulk", "relay", "relay but last"])
def every_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles get to other devices as the pipeline chooses, all in bulk, and by a relay wherever there can be one."""
    if request.param == "as chosen":
        return
    way = {"bulk": BULK, "relay": RELAY, "relay but last": RELAY_BUT_LAST}[request.param].value

    def forced(kind: str, stage: Stage, copies: int, sms: int, *, last: bool, read_later: bool) -> int:
        return way if kind == "persistent" and (last or read_later) and copies > 1 else BULK.value

    monkeypatch.setattr(cuda_pipeline, "way_of", forced)
