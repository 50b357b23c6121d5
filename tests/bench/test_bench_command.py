"""`tilerelay bench` and `bench-report` from the outside: bad input, skipped cells, resuming, exit statuses."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import tilerelay.bench.run as run_module
from tilerelay.bench import results, supervisor
from tilerelay.bench.results import Results

# By its name: the package has a function of the same name.
command = importlib.import_module("tilerelay.cli.bench")

FAKE = Path(__file__).with_name("fake_worker.py")
app = typer.Typer()
app.command("bench")(command.bench)
app.command("bench-report")(command.bench_report)


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, machine: dict[str, Any]) -> Callable[..., Any]:
    """The command on a made-up machine with two GPUs, with made-up workers."""
    started: list[str] = []
    trouble: list[str] = []

    def command_of(process_set: str, gpus: int) -> supervisor.Command:
        started.append(f"{process_set} {gpus}")
        return lambda plan, events: [sys.executable, str(FAKE), str(plan), str(events), *trouble]

    monkeypatch.setattr(command, "machine_facts", lambda commit: {**machine, "commit": commit})
    monkeypatch.setattr(run_module, "run", lambda *a, _run=run_module.run, **k: _run(*a, **k, command_of=command_of))

    def call(*arguments: str, with_trouble: str = "") -> Any:
        trouble[:] = [with_trouble] if with_trouble else []
        result = CliRunner().invoke(app, list(arguments))
        result.started, started[:] = list(started), []  # type: ignore[attr-defined]
        return result

    return call


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--suite", "paper-fig6"], "unknown suite 'paper-fig6'; choose one of paper-fig4, paper-fig5"),
        (["--methods", "tp"], "unknown method 'tp'"),
        (["--m", "1000"], "no cell with M=1000"),
        (["--m", "many"], "whole positive numbers"),
        (["--m", "-1024"], "whole positive numbers"),
        (["--m", "0"], "whole positive numbers"),
        (["--m", "10٣"], "whole positive numbers"),
        (["--gpus", "3"], "no cell with GPUs=3"),
        (["--gpus", "two"], "whole positive numbers"),
        (["--rounds", "0"], "give 1 to 1000"),
        (["--rounds", "-5"], "give 1 to 1000"),
        (["--timing", "sundial"], "unknown timing 'sundial'"),
        (["--suite", "paper-fig5", "--gpus", "4"], "no cell with GPUs=4; it has 2"),
    ],
)
def test_bad_input_is_one_line_and_status_2(invoke: Callable[..., Any], arguments: list[str], words: str) -> None:
    result = invoke("bench", *arguments)
    assert result.exit_code == 2 and result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("tilerelay bench: ") and words in line
    assert result.started == []


@pytest.mark.parametrize("content", ["", '{"schema": 1', '{"schema": 99, "machine": {}, "records": []}'])
def test_a_bad_results_file_is_one_line_and_status_2(invoke: Callable[..., Any], tmp_path: Path, content: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(content)
    for arguments in (["bench", "--out", str(path)], ["bench-report", str(path), "--out", str(tmp_path / "report")]):
        result = invoke(*arguments)
        assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1, result.stderr
    assert path.read_text() == content


def test_results_of_another_machine_are_not_touched(
    invoke: Callable[..., Any], tmp_path: Path, make_results: Callable[..., Results]
) -> None:
    path = tmp_path / "r.json"
    elsewhere = make_results(4096)
    elsewhere.machine = {**elsewhere.machine, "gpu": "NVIDIA B200"}
    results.save(elsewhere, path)
    before = path.read_text()
    result = invoke("bench", "--out", str(path), "--commit", "abc1234")
    assert result.exit_code == 2 and "gpu NVIDIA B200 / NVIDIA H200" in result.stderr
    assert path.read_text() == before


def test_a_run_writes_both_sets_and_goes_on_where_it_stopped(invoke: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    result = invoke("bench", "--suite", "quick", "--out", str(path), "--commit", "c1")
    assert result.exit_code == 0, result.output
    assert result.started == ["one-process 2", "torchrun 2"]
    assert "| pipelined |" in result.stdout and "| sharded |" in result.stdout
    have = results.load(path)
    assert have.machine["commit"] == "c1"
    assert {(r.process_set, r.method) for r in have.records} >= {("one-process", "pipelined"), ("torchrun", "async-tp")}
    tp = next(r for r in have.records if r.method == "tp-nccl")
    assert tp.suite == ["paper-fig5", "paper-fig7", "latency", "quick"] and tp.paper_reduction == 0.239

    again = invoke("bench", "--suite", "quick", "--out", str(path), "--commit", "c1")
    assert again.exit_code == 0 and again.started == [] and again.stderr.count("already measured") == 2
    more = invoke("bench", "--suite", "paper-fig5", "--m", "4096,8192", "--out", str(path), "--commit", "c1")
    assert more.started == ["one-process 2", "torchrun 2"] and more.stderr.count("already measured") == 2
    assert {r.m for r in results.load(path).records} == {4096, 8192}
    other = invoke("bench", "--suite", "quick", "--out", str(path), "--commit", "c2")
    assert other.exit_code == 2 and "commit c1 / c2" in other.stderr


def test_json_is_the_results_of_what_was_asked_for(invoke: Callable[..., Any], tmp_path: Path) -> None:
    result = invoke("bench", "--methods", "pipelined", "--json", "--rounds", "3")
    data = json.loads(result.stdout)
    assert data["machine"]["gpu"] == "NVIDIA H200" and [r["method"] for r in data["records"]] == ["floor", "pipelined"]


def test_cells_beyond_this_machine_are_named(invoke: Callable[..., Any]) -> None:
    result = invoke("bench", "--suite", "paper-fig4", "--methods", "pipelined")
    assert result.exit_code == 0 and result.started == ["one-process 2"]
    assert "4 GPUs: this machine has 2 GPUs" in result.stderr and "8 GPUs: this machine has 2 GPUs" in result.stderr


def test_nothing_to_measure_is_not_success(invoke: Callable[..., Any]) -> None:
    result = invoke("bench", "--suite", "paper-fig4", "--gpus", "8")
    assert result.exit_code == 1 and "nothing was measured" in result.stderr


def test_a_failed_method_is_told_and_makes_the_status_1(invoke: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    result = invoke("bench", "--methods", "tp-nccl,pipelined", "--out", str(path), with_trouble="tp-nccl=crash")
    assert result.exit_code == 1 and "failed: tp-nccl" in result.stderr
    assert {r.method: r.status for r in results.load(path).records} == {
        "floor": "ok",
        "pipelined": "ok",
        "tp-nccl": "error",
    }


def test_asking_imports_no_torch() -> None:
    """`--help` and bad input answer at once."""
    code = "import sys, tilerelay.cli.bench, tilerelay.bench.run, tilerelay.bench.report; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
