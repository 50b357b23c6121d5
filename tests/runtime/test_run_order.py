"""Who waits for whom around a run on GPUs, with streams and events that only note it."""

from __future__ import annotations

import threading
import weakref
from contextlib import nullcontext

import pytest
import torch

from tilerelay.errors import InvalidInput
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
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[device])
    monkeypatch.setattr(run_order, "raw_stream", lambda device: streams[device].cuda_stream)
    monkeypatch.setattr(run_order, "_LAST", {})
    return streams


class Owner:
    """A pipeline, as far as a run's order knows it: it waits for its runs."""

    def __init__(self) -> None:
        self.finished: list[object] = []

    def finish(self, event: object) -> None:
        self.finished.append(event)


OWNER = Owner()


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
    order = RunOrder([0, 1, 2], OWNER.finish)
    ends = [run(order) for _ in range(before)]
    assert current[0].waits == []
    current[2].idle = False
    end = run(order)
    (wait,) = current[0].waits
    assert wait.where is current[2]
    assert end.where is current[0]
    assert current[1].waits == current[2].waits == [*ends, end], "what comes there next is behind the run"


def test_another_current_stream_is_noticed(current: dict[int, Stream]) -> None:
    order = RunOrder([0, 1], OWNER.finish)
    run(order)
    current[1] = other = Stream(1)
    other.idle = False
    end = run(order)
    (wait,) = current[0].waits
    assert wait.where is other and other.waits == [end]


def test_a_run_on_one_stream_alone_is_ordered_there_and_behind_other_pipelines(current: dict[int, Stream]) -> None:
    order, other = (RunOrder([0, 1], OWNER.finish) for _ in range(2))
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
    order = RunOrder([0], OWNER.finish)
    first, second = run(order), run(order)
    assert current[0].waits == [] and first is not second
    current[0] = other = Stream(0)
    third = run(order)
    assert other.waits == [second] and third.where is other


def test_pipelines_that_share_a_device_take_turns(current: dict[int, Stream]) -> None:
    one, two, apart = (RunOrder(devices, OWNER.finish) for devices in ([0, 1], [1, 0], [2]))
    end = run(one)
    run(apart)
    assert current[2].waits == []
    current[1].waits.clear()
    run(two)
    assert set(current[1].waits) == {end}
    run(one)
    assert current[0].waits[-1] is two.last


def test_no_more_runs_are_outstanding_than_the_driver_takes(current: dict[int, Stream]) -> None:
    owner = Owner()
    order = RunOrder([0], owner.finish)
    ends = [run(order) for _ in range(OUTSTANDING_RUNS)]
    assert owner.finished == [] and len(set(ends)) == OUTSTANDING_RUNS
    assert run(order) is ends[0] and owner.finished == [ends[0]]


def test_pipelines_are_not_kept_alive_by_their_last_runs(current: dict[int, Stream]) -> None:
    owner = Owner()
    run(RunOrder([0, 1], owner.finish))
    gone = weakref.ref(owner)
    del owner
    assert gone() is None


def test_a_launch_of_another_thread_waits_until_this_one_is_known(current: dict[int, Stream]) -> None:
    one, two = (RunOrder([0, 1], OWNER.finish) for _ in range(2))
    other = threading.Thread(target=run, args=(two,))

    def launch() -> None:
        other.start()
        other.join(0.05)

    one.run(launch)
    other.join()
    assert one.last in current[0].waits, "the other launch came second, and behind this one"


def test_a_run_that_is_launched_counts_whatever_comes_then(current: dict[int, Stream]) -> None:
    order = RunOrder([0, 1], OWNER.finish)
    current[1].wait_event = interrupted  # type: ignore[method-assign, assignment]
    with pytest.raises(KeyboardInterrupt):
        order.run(lambda: None)
    assert order.runs == 1 and order.last is not None
    current[0] = Stream(0)
    run(RunOrder([0], OWNER.finish))
    assert current[0].waits == [order.last]


def interrupted(event: Event) -> None:
    raise KeyboardInterrupt


def test_not_in_a_capture_of_the_callers(current: dict[int, Stream], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    order = RunOrder([0, 1], OWNER.finish)
    with pytest.raises(InvalidInput, match="capture of your own"):
        order.run(lambda: pytest.fail("launched"))
    assert order.runs == 0
