"""GPU tests: each is skipped, and says so, on a machine with fewer Hopper GPUs than it names (see cases.needs)."""

import os

os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/gpu" in str(item.path):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(autouse=True)
def _hopper_gpu() -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability(0) != (9, 0):
        pytest.skip("needs a Hopper GPU")
