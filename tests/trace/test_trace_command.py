"""`tilerelay trace` from the outside, and what the measuring script makes of what it has measured."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tests.trace.made import T1, T2, pipeline
from tilerelay.cli.timeline import COLUMNS, draw
from tilerelay.cli.trace import trace as app
from tilerelay.errors import InvalidInput
from tilerelay.graph.catalog import gemm_chain
from tilerelay.kernels.config import configure
from tilerelay.runtime import tracing
from tilerelay.runtime.protocol_cost import resources
from tilerelay.trace import chrome
from tilerelay.trace.events import ClockInfo, Trace
from tilerelay.trace.overhead import overhead
from tilerelay.trace.overhead_report import ORDERS, PROTOCOLS, markdown

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "measure_trace.py"


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.fixture
def made(tmp_path: Path) -> Path:
    chrome.write(pipeline(), tmp_path / "made.json")
    return tmp_path / "made.json"


def test_run_writes_a_trace_and_a_page(tmp_path: Path) -> None:
    out, page = tmp_path / "t.json", tmp_path / "t.html"
    done = invoke("run", "--backend", "cpu", "--m", 128, "--out", out, "--html", page)
    assert done.exit_code == 0, done.output
    trace = chrome.read(out)
    assert len(trace) == 8 and trace.run["backend"] == "cpu"
    assert "virtual device 1" in page.read_text()
    for part in ("ramp", "critical path", "stage 1 |"):
        assert part in done.output
    shown = invoke("show", out)
    assert shown.exit_code == 0 and shown.output == done.output


def test_a_sharded_run_is_shown_part_by_part() -> None:
    done = invoke("run", "--backend", "cpu", "--m", 128, "--placement", "sharded")
    assert done.exit_code == 0, done.output
    for part in ("virtual device 0 (layer0[0:64], layer1[0:64])", "virtual device 1 -> virtual device 0"):
        assert part in done.output


def test_show_gives_numbers_and_pages(made: Path, tmp_path: Path) -> None:
    done = invoke("show", made, "--json", "--html", tmp_path / "again.html")
    assert done.exit_code == 0
    values = json.loads(done.output)
    assert values["ramp"] + values["steady"] + values["tail"] == values["total"] == pipeline().end
    assert (tmp_path / "again.html").read_text().startswith("<!doctype html>")


def test_overhead_stands_beside_the_papers(made: Path) -> None:
    done = invoke("overhead", made)
    assert done.exit_code == 0
    (line,) = [line for line in done.output.splitlines() if line.split()[:1] == ["T2"]]
    assert "5.00" in line and f"{T2 / 1e3:.2f}" in line
    values = json.loads(invoke("overhead", made, "--json").output)
    assert values["T1"]["median"] == pytest.approx(T1 / 1e3)


def test_overhead_of_steps_is_refused(tmp_path: Path) -> None:
    t = pipeline()
    path = tmp_path / "steps.json"
    chrome.write(Trace(t.stages, t.edges, ClockInfo("scheduler", "steps"), {}, t.keys, t.times), path)
    with pytest.raises(InvalidInput, match="counts steps"):
        CliRunner().invoke(app, ["overhead", str(path)], catch_exceptions=False)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["show", "{tmp}/none.json"], "cannot be read"),
        (["show", "{tmp}/cut.json"], "cut off"),
        (["overhead", "{tmp}/foreign.json"], "not a trace of tilerelay"),
        (["run", "--backend", "cpu", "--out", "{tmp}/no/t.json"], "does not exist"),
        (["run", "--backend", "cpu", "--html", "{tmp}/no/t.html"], "does not exist"),
        (["run", "--backend", "cpu", "--out", "{tmp}/t", "--html", "{tmp}/../{name}/t"], "name two files"),
        (["run", "--backend", "tpu"], "choose cuda or cpu"),
        (["run", "--backend", "cpu", "--layers", "3", "--devices", "0,1"], "2 devices for 3 layers"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], what: str, made: Path, tmp_path: Path) -> None:
    (tmp_path / "cut.json").write_text(made.read_text()[:-100])
    (tmp_path / "foreign.json").write_text('{"traceEvents": []}')
    with pytest.raises(InvalidInput, match=what) as caught:
        CliRunner().invoke(app, [a.format(tmp=tmp_path, name=tmp_path.name) for a in arguments], catch_exceptions=False)
    assert "\n" not in str(caught.value)


def test_a_trace_that_does_not_fit_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "free_bytes", lambda backend: lambda device: 100)
    with pytest.raises(InvalidInput, match="need 384 bytes on device 0, 100 are free"):
        CliRunner().invoke(app, ["run", "--backend", "cpu"], catch_exceptions=False)


def test_the_terminal_timeline_shows_when_stages_work() -> None:
    lines = draw(pipeline()).splitlines()
    first, second = (line.split("|")[1] for line in lines[:2])
    assert len(first) == len(second) == COLUMNS
    assert first.startswith("#") and first.endswith("...")
    assert second.startswith("...") and second.endswith("#")
    assert lines[2].endswith("us")


def test_the_sub_commands_are_there() -> None:
    group = typer.main.get_command(app)
    assert set(group.commands) == {"run", "show", "overhead"}  # type: ignore[attr-defined]


# The measuring script


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("measure_trace", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def report() -> dict[str, Any]:
    found = overhead(pipeline())
    places = [("alone", "local"), ("alone", "peer"), ("pipelined", "peer"), ("shares", "local")]
    quantities = [
        {"kernel": "persistent", "order": o, "destination": d, "run": r, "name": name, **q.to_json()}
        for o in ORDERS for r, d in places for name, q in found.items()
    ]  # fmt: skip
    alone = [
        {"kernel": "persistent", "order": o, "destination": d, "protocol": p, "us": {"median": 1000.0 + 10 * p}}
        for o in ORDERS for d in ("local", "peer") for p in (False, True)
    ]  # fmt: skip
    ends = {"latency_us": 1170.0, "producer_end_us": 1090.0, "consumer_begin_us": 60.0, "consumer_end_us": 1165.0}
    variant = {"kernel": "persistent", "registers": 168, "shared_bytes": 230_000, "spilled_bytes": 0}
    return {
        "shape": [16384, 8192, 8192], "signalling": "counter", "commit": "abc",
        "machine": {"gpu": "some GPU", "gpus": 2},
        "clock": {"granularity_ns": 32, "error_ns": 1400.0}, "quantities": quantities, "alone": alone,
        "resources": [{**variant, "protocol": protocol} for protocol in ("none", "producer", "consumer")],
        "pipelined": [{"kernel": "persistent", "order": o, **ends} for o in ORDERS],
        "tracing": [{"kernel": "persistent", "off_us": 1000.0, "on_us": 1012.0}],
    }  # fmt: skip


def test_the_report_puts_the_papers_figures_beside_ours() -> None:
    text = markdown(json.loads(json.dumps(report())))
    assert "| persistent | T2: until visible on the consumer's device | 5.00 | 2.50 (2.50 to 2.50) |" in text
    assert "| persistent | the pipeline's own | 1000 | 1010 (+1.0 %) | 1000 | 1010 (+1.0 %) |" in text
    assert "| persistent | row-major | 1000 | 1090 | 60.0 | 1165 | 1170 |" in text
    assert "| persistent | 1000 | 1012 | +1.20 % |" in text
    assert "agree within 1.40 us" in text
    for row in (line for line in text.splitlines() if line.startswith("| persistent | pipelined")):
        assert row.count("|") == 10 and " - " not in row


def test_the_report_does_without_what_a_kernel_lacks() -> None:
    values = report()
    for q in values["quantities"]:
        if q["name"] == "T2":
            q.update(dict.fromkeys(("p05", "median", "p95", "p99", "max"), None), tiles=0, hidden=1.0)
    values["resources"] = []
    values["quantities"] = [q for q in values["quantities"] if q["name"] != "T4"]
    text = markdown(values)
    assert "| - (- to -) |" in text and "registers" not in text and "T4: " not in text


def test_the_short_table_ends_with_what_tracing_costs(script: ModuleType) -> None:
    lines = script.short_table(report())
    assert lines[-1] == "persistent: tracing costs +1.20 %"
    assert any(line.split()[:4] == ["persistent", "pipelined", "peer", "T1"] for line in lines)


def test_orders_are_the_named_ones(script: ModuleType) -> None:
    workload = gemm_chain(2, 256, 512, 128, tile=(128, 256))
    assert script.ordered(workload, "own").stages[0].order is None
    assert script.ordered(workload, "row-major").stages[0].order.tolist() == [0, 1, 2, 3]
    assert script.ordered(workload, "column-major").stages[0].order.tolist() == [0, 2, 1, 3]
    assert script.ordered(workload, "column-major").stages[1] is workload.stages[1]


def test_the_script_says_in_one_line_what_is_missing(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert script.main(["--commit", "abc", "--out", str(tmp_path / "r"), "--m", "256"]) == 2
    assert capsys.readouterr().err.count("\n") == 1 and not (tmp_path / "r").exists()
    assert "tilerelay.cli" not in sys.modules or "typer" not in SCRIPT.read_text()


def test_what_a_variant_needs_is_read_from_its_code() -> None:
    config = configure("persistent", (128, 256))
    plain, producer, consumer = (resources(config, protocol) for protocol in PROTOCOLS)
    assert plain and producer and consumer and len({str(v) for v in (plain, producer, consumer)}) == 3
    # The hooks' scratch, no tile's buffer.
    assert 100_000 < plain["shared_bytes"] <= producer["shared_bytes"] < plain["shared_bytes"] + 1024
    assert plain["registers"] > 0 and producer["spilled_bytes"] == 0
