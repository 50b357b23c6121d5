"""Chrome traces and HTML pages: the documented form, everything there and back, and files that are refused.

The JSON is checked here against the Trace Event Format document, event by event; test_perfetto.py has Perfetto read it.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from tests.trace.made import MATH, WORKERS, pipeline, random_trace, table
from tilerelay.errors import InvalidInput
from tilerelay.graph.catalog import dense_chain
from tilerelay.trace import chrome, html
from tilerelay.trace.events import PHASES, Trace
from tilerelay.trace.path import critical_path
from tilerelay.trace.picture import PLOT

NUMBER = (int, float)
# Trace Event Format: the keys that an event of each kind must have, beside those that all have.
MUST = {"M": {"args"}, "X": {"dur", "cat", "args"}, "s": {"id", "cat"}, "f": {"id", "cat", "bp"}}


def same(a: Trace, b: Trace) -> bool:
    edges = [(e.producer, e.consumer, [(x.tolist(), y.tolist()) for x, y in e.groups]) for t in (a, b) for e in t.edges]
    half = len(edges) // 2
    arrays = np.array_equal(a.keys, b.keys) and np.array_equal(a.times, b.times)
    facts = (a.stages, a.clock, dict(a.run)) == (b.stages, b.clock, dict(b.run))
    return arrays and facts and edges[:half] == edges[half:]


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """A made-up run as it is read back from JSON text: strict JSON, without NaN."""

    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is not JSON")

    return json.loads(json.dumps(chrome.to_chrome(pipeline())), parse_constant=refuse)


@pytest.mark.parametrize("seed", range(20))
def test_a_trace_comes_back_as_it_was(seed: int, tmp_path: Path) -> None:
    trace = pipeline() if seed == 0 else random_trace(np.random.default_rng(seed))
    chrome.write(trace, tmp_path / "t.json")
    assert same(chrome.read(tmp_path / "t.json"), trace)


def test_every_event_has_the_documented_form(document: dict[str, Any]) -> None:
    assert document["displayTimeUnit"] in ("ms", "ns")
    for event in document["traceEvents"]:
        assert event["ph"] in MUST and event.keys() >= MUST[event["ph"]] | {"name", "pid", "tid", "ts"}
        assert isinstance(event["name"], str) and isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert event["pid"] > 0 and event["tid"] > 0
        assert isinstance(event["ts"], NUMBER) and event["ts"] >= 0 and event.get("dur", 1) > 0
        assert isinstance(event.get("args", {}), dict)


def test_every_thread_has_a_name_and_slices_do_not_overlap(document: dict[str, Any]) -> None:
    threads: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in document["traceEvents"]:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append(event)
    named = {(e["pid"], e["tid"]) for e in document["traceEvents"] if e["name"] == "thread_name"}
    assert named == threads.keys() and len(named) == 2 * 3 * WORKERS
    for events in threads.values():
        ends = 0.0
        for event in sorted(events, key=lambda e: e["ts"]):
            assert event["ts"] >= ends - 1e-6
            ends = event["ts"] + event["dur"]


def test_every_tile_has_its_phases(document: dict[str, Any]) -> None:
    slices = [e for e in document["traceEvents"] if e["ph"] == "X"]
    for stage in ("layer0", "layer1"):
        for phase in PHASES:
            tiles = sorted(e["args"]["tile"] for e in slices if e["cat"] == stage and e["name"] == phase)
            assert tiles == list(range(12)), f"{stage}: {phase}"
    assert {e["dur"] for e in slices if e["name"] == "math"} == {MATH / 1e3}


def test_arrows_follow_the_critical_path_from_slice_to_slice(document: dict[str, Any]) -> None:
    arrows: dict[int, dict[str, dict[str, Any]]] = defaultdict(dict)
    for event in document["traceEvents"]:
        if event["ph"] in "sf":
            arrows[event["id"]][event["ph"]] = event
    trace = pipeline()
    steps = critical_path(trace)
    assert len(arrows) == len(steps) - 1 > 2
    for number, arrow in arrows.items():
        assert arrow["s"]["ts"] <= arrow["f"]["ts"]
        for end, step in (("s", steps[number]), ("f", steps[number + 1])):
            around = [
                e
                for e in document["traceEvents"]
                if e["ph"] == "X"
                and (e["pid"], e["tid"]) == (arrow[end]["pid"], arrow[end]["tid"])
                and e["ts"] <= arrow[end]["ts"] < e["ts"] + e["dur"]
            ]
            assert [e["args"]["tile"] for e in around] == [int(trace.keys[step.record, 1])]


def test_a_steps_clock_is_written_as_microseconds() -> None:
    trace = pipeline()
    steps = Trace(trace.stages, trace.edges, type(trace.clock)("scheduler", "steps"), {}, trace.keys, trace.times)
    durations = {e["dur"] for e in chrome.to_chrome(steps)["traceEvents"] if e["name"] == "math"}
    assert durations == {float(MATH)}


# Files that are refused


def damage(text: str, what: str) -> str:
    values = json.loads(text)
    ours = values["tilerelay"]
    if what == "cut off":
        return text[: len(text) // 2]
    if what == "empty":
        return ""
    if what == "foreign":
        del values["tilerelay"]
    elif what == "a list":
        return "[1, 2]"
    elif what == "format":
        ours["format"] = 99
    elif what == "columns":
        ours["columns"] = ours["columns"][:-1]
    elif what == "no clock":
        del ours["clock"]
    elif what == "short record":
        ours["records"][3].pop()
    elif what == "text in a record":
        ours["records"][3][5] = "soon"
    elif what == "tile":
        ours["records"][0][1] = 10**6
    elif what == "huge number":
        ours["records"][0][5] = 2**70
    elif what == "edge":
        ours["edges"][0]["consumer"] = 7
    elif what == "edge of text":
        ours["edges"][0]["consumer"] = "one"
    elif what == "run of tiles":
        ours["edges"][0]["groups"][0][0] = [[0, 10**9]]
    elif what == "first tiles":
        ours["edges"][0]["first"].pop()
    elif what == "unit":
        ours["clock"]["unit"] = "fortnights"
    elif what == "grid":
        ours["stages"][0]["m"] = 0
    elif what == "stages":
        ours["stages"] = 3
    elif what == "table":
        values["tilerelay"] = [1]
    return json.dumps(values)


DAMAGES = {
    "cut off": "cut off", "empty": "cut off", "foreign": "not a trace of tilerelay", "a list": "not a trace",
    "format": "format 99", "columns": "columns", "no clock": "no 'clock'", "short record": "damaged",
    "text in a record": "damaged", "tile": "not in their stage's grid", "huge number": "damaged", "edge": "0 -> 7",
    "edge of text": "damaged", "run of tiles": "of a stage with 12", "unit": "fortnights", "grid": "m=0",
    "stages": "damaged", "table": "not a JSON object", "first tiles": "begins 5 of 6 groups",
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_file_is_refused_in_one_line(what: str, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    chrome.write(pipeline(), path)
    path.write_text(damage(path.read_text(), what))
    with pytest.raises(InvalidInput, match=DAMAGES[what]) as caught:
        chrome.read(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_a_file_that_is_no_text_or_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_bytes(b"\x93\xff\x00")
    for path, what in (
        (tmp_path / "t.json", "not a JSON file"),
        (tmp_path / "none", "No such file"),
        (tmp_path, "read"),
    ):
        with pytest.raises(InvalidInput, match=what):
            chrome.read(path)
    for write in (chrome.write, html.write):
        with pytest.raises(InvalidInput, match="cannot be written"):
            write(pipeline(), tmp_path / "no" / "t")


# The page


class Reader(HTMLParser):
    """Notes tags that are not closed in order, attributes, and text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read_page(trace: Trace) -> tuple[str, Reader]:
    page = html.to_html(trace)
    reader = Reader()
    reader.feed(page)
    assert reader.open == []
    return page, reader


def test_the_page_stands_alone() -> None:
    page, reader = read_page(pipeline())
    assert not {"script", "link", "img", "iframe", "object", "image"} & set(reader.tags)
    assert not {name for name, _ in reader.attributes} & {"src", "href", "xlink:href", "data", "action"}
    assert "http" not in page and "url(" not in page and "@import" not in page


def test_the_page_shows_every_device_and_every_number_of_the_summary() -> None:
    page, reader = read_page(pipeline())
    text = " ".join(reader.text)
    for part in (
        "GPU 0: layer0",
        "GPU 1: layer1",
        "ramp",
        "steady state",
        "tail",
        "idle share",
        "GPU 0 to GPU 1",
        "0.8 MB",
    ):
        assert part in text
    assert text.count("critical path") + text.count("Critical path") >= 2
    pictures = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(pictures) == 2
    for picture in pictures:
        ElementTree.fromstring(picture)


def test_strokes_cover_each_workers_whole_line() -> None:
    trace = pipeline()
    page, _ = read_page(trace)
    for picture in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        rows = next(g for g in ElementTree.fromstring(picture) if g.get("class") == "rows")
        lengths: dict[str, float] = defaultdict(float)
        for path in rows:
            for y, length in re.findall(r"M[\d.]+ ([\d.]+)h([\d.]+)", path.get("d", "")):
                lengths[y] += float(length)
        assert len(lengths) == WORKERS
        assert list(lengths.values()) == pytest.approx([PLOT] * WORKERS, abs=1)


def test_the_critical_path_is_drawn_on_the_devices_that_it_visits() -> None:
    trace = pipeline()
    page, _ = read_page(trace)
    titles = re.findall(r"<title>(tile .*?)</title>", page)
    assert len(titles) == len(critical_path(trace))
    assert any("arrival" in title for title in titles)


def test_names_are_escaped() -> None:
    trace = pipeline()
    stages = tuple(type(s)("<b>&", s.kernel, s.grid, s.k, s.workers) for s in trace.stages)
    evil = Trace(stages, trace.edges, trace.clock, {"placement": "<script>"}, trace.keys, trace.times)
    page, reader = read_page(evil)
    assert "<b>" not in page and "script" not in reader.tags


@pytest.mark.parametrize("seed", range(10))
def test_any_trace_has_a_page(seed: int) -> None:
    read_page(random_trace(np.random.default_rng(seed)))


def test_events_in_the_wrong_order_are_said() -> None:
    wrong = table(dense_chain(64, [64, 64], tile=(64, 64)), [((0, 0, 0, 0), (5, 9, 7, 30, 40, 50))])
    assert "1 tiles have events in the wrong order" in read_page(wrong)[0]
    assert "wrong order" not in read_page(pipeline())[0]
