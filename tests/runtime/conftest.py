"""Processes that all tests of pipelines on virtual devices share, and pipelines on them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.pipelines import Make, weights_of
from tilerelay import Pipeline
from tilerelay.graph.workload import Workload
from tilerelay.kernels.sync import INTERPRETED
from tilerelay.runtime import pipeline as pipeline_module
from tilerelay.runtime import virtual
from tilerelay.runtime.virtual_workers import Workers

sys.path.append(str(Path(__file__).parent))  # the workers get this process's path, and find the program there
from faulty_program import FaultyProgram


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    """Four processes for all tests that leave them alive: starting them takes seconds."""
    assert not INTERPRETED.value, "these tests are about parents that compile"
    started = Workers(4)
    yield started
    started.close()


@pytest.fixture
def make(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes pipelines on the shared workers, with random weights, and closes them."""
    made: list[Pipeline] = []

    class Shared(virtual.VirtualPipeline):
        program = FaultyProgram

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs, workers=workers)

    monkeypatch.setattr(pipeline_module, "VirtualPipeline", Shared)

    def one(workload: Workload, **options: Any) -> Pipeline:
        options.setdefault("weights", weights_of(workload))
        made.append(Pipeline(workload, options.pop("weights"), **options))
        return made[-1]

    yield one
    for pipeline in made:
        pipeline.close()
