"""Who waits for whom around a run on GPUs, with streams and events that only note it."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from tilerelay.runtime import run_order
from tilerelay.runtime.run_order import OUTSTANDING_RUNS, RunOrder


class Stream:
    def __init__(self, device: int) -> None:
        self.device_index, self.cuda_stream = device, id(self)
        self.idle = True
        self.waits: list[Event] = []

    def query(self) -> bool:
        return self.idle

    def wait_event(self, event: Event) -> None:
        self.waits.append(event)


class Event:
    where: Stream | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.where = stream


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> dict[int, Stream]:
    """The current stream of each of three devices."""
    streams = {device: Stream(device) for device in range(3)}
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[device])
    monkeypatch.setattr(run_order, "raw_stream", lambda device: streams[device].cuda_stream)
    monkeypatch.setattr(run_order, "_LAST", {})
    return streams


def run(order: RunOrder, **options: bool) -> Event:
    """The end of a run, which is launched when all that it waits for is on the home's stream."""
    launched = order.runs
    waits: list[int] = []
    home = torch.cuda.current_stream(order._home)
    order.run(lambda: waits.append(len(home.waits)), **options)  # type: ignore[attr-defined]
    assert waits == [len(home.waits)] and order.runs == launched + 1  # type: ignore[attr-defined]
    assert isinstance(order.last, Event)
    return order.last


@pytest.mark.parametrize("before", [0, 2], ids=["first run", "later run"])
def test_a_run_waits_for_what_is_under_way_on_its_devices_and_for_nothing_else(
    current: dict[int, Stream], before: int
) -> None:
    order = RunOrder([0, 1, 2], lambda event: None)
    ends = [run(order) for _ in range(before)]
    assert current[0].waits == []
    current[2].idle = False
    end = run(order)
    (wait,) = current[0].waits
    assert wait.where is current[2]
    assert end.where is current[0]
    assert current[1].waits == current[2].waits == [*ends, end], "what comes there next is behind the run"


def test_another_current_stream_is_noticed(current: dict[int, Stream]) -> None:
    order = RunOrder([0, 1], lambda event: None)
    run(order)
    current[1] = other = Stream(1)
    other.idle = False
    end = run(order)
    (wait,) = current[0].waits
    assert wait.where is other and other.waits == [end]


def test_a_run_on_one_stream_alone_is_ordered_there_and_behind_other_pipelines(current: dict[int, Stream]) -> None:
    order, other = (RunOrder([0, 1], lambda event: None) for _ in range(2))
    current[1].idle = False
    run(order, all_streams=False)
    assert current[0].waits == current[1].waits == []
    end = run(other, all_streams=False)
    run(order, all_streams=False)
    assert end in current[0].waits and current[1].waits == []
    current[0].waits.clear()
    run(order)
    assert [wait.where for wait in current[0].waits] == [current[1]], "runs before say nothing of the other streams"


def test_runs_on_one_stream_need_no_wait_runs_on_two_do(current: dict[int, Stream]) -> None:
    order = RunOrder([0], lambda event: None)
    first, second = run(order), run(order)
    assert current[0].waits == [] and first is not second
    current[0] = other = Stream(0)
    third = run(order)
    assert other.waits == [second] and third.where is other


def test_pipelines_that_share_a_device_take_turns(current: dict[int, Stream]) -> None:
    one, two, apart = (RunOrder(devices, lambda event: None) for devices in ([0, 1], [1, 0], [2]))
    end = run(one)
    run(apart)
    assert current[2].waits == []
    current[1].waits.clear()
    run(two)
    assert set(current[1].waits) == {end}
    run(one)
    assert current[0].waits[-1] is two.last


def test_no_more_runs_are_outstanding_than_the_driver_takes(current: dict[int, Stream]) -> None:
    finished: list[object] = []
    order = RunOrder([0], finished.append)
    ends = [run(order) for _ in range(OUTSTANDING_RUNS)]
    assert finished == [] and len(set(ends)) == OUTSTANDING_RUNS
    assert run(order) is ends[0] and finished == [ends[0]]
