"""GPU tests: skipped, and said so, on a machine with fewer than two Hopper GPUs."""

import os

os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/gpu" in str(item.path):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(autouse=True)
def _two_hopper_gpus() -> None:
    if torch.cuda.device_count() < 2 or torch.cuda.get_device_capability(0) != (9, 0):
        pytest.skip("needs two Hopper GPUs")
