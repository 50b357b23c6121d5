"""Processes that the tests of clocks and traces share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tilerelay.runtime.virtual_workers import Workers


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    started = Workers(2)
    yield started
    started.close()
