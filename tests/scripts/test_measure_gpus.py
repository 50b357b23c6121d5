"""scripts/measure_gpus.py with made-up steps and results: what fails or takes too long, and the summary."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts import measure_gpus
from scripts.measure_gpus import BASELINES, OURS, TARGETS, Step, judge, run_step, run_steps, steps_of, target_lines
from tilerelay.baselines.cell import Cell
from tilerelay.bench import results
from tilerelay.bench.methods import NAMES
from tilerelay.bench.records import Record, blank
from tilerelay.bench.suites import cells_of


def python(code: str, limit_s: float = 60, **options: Any) -> Step:
    return Step(options.pop("name", "step"), [sys.executable, "-c", code], limit_s, **options)


def record(cell: Cell, method: str, ratio: float, **changes: Any) -> Record:
    made = blank(cell, method, changes.pop("process_set", "one-process"), changes.pop("timing", "graph"), "ok")
    made.median_us = made.min_us = made.max_us = 100 * ratio
    made.ratio_to_floor = ratio
    return made


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["3", "--commit", "c", "--out", "o"], "invalid choice: 3"),
        (["four", "--commit", "c", "--out", "o"], "invalid int value"),
        (["4", "--out", "o"], "required: --commit"),
        (["4", "--commit", "c"], "required: --out"),
        (["8", "--commit", "c", "--out", "o", "--steps", "third-gpu"], "third-gpu: none of tests, bench"),
    ],
)
def test_bad_arguments(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        measure_gpus.main(arguments)
    assert caught.value.code == 2 and words in capsys.readouterr().err


def test_too_few_gpus_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert measure_gpus.main(["4", "--commit", "c", "--out", str(tmp_path / "o")]) == 2
    assert capsys.readouterr().err == "measure_gpus: needs 4 GPUs, this machine has 2\n"
    assert not (tmp_path / "o").exists()


def test_steps(tmp_path: Path) -> None:
    four, eight = ({s.name: list(s.command) for s in steps_of(n, "c1", tmp_path)} for n in (4, 8))
    assert list(four) == ["tests", "third-gpu", "bench"] and list(eight) == ["tests", "bench"]
    assert four["bench"][-8:-2] == ["--suite", "all", "--gpus", "4", "--commit", "c1"]
    assert "8" in eight["bench"]
    assert (measure_gpus.ROOT / four["third-gpu"][1]).is_file() and (measure_gpus.ROOT / "tests" / "gpu").is_dir()


def test_what_becomes_of_a_step(tmp_path: Path) -> None:
    assert run_step(python("import tilerelay; print('3 passed')", must_say=r"\b[1-9]\d* passed"), tmp_path) == ""
    assert (tmp_path / "step.log").read_text() == "3 passed\n"
    assert run_step(python("print('12 skipped')", must_say=r"\b[1-9]\d* passed"), tmp_path) == "nothing passed"
    assert run_step(python("raise SystemExit(3)"), tmp_path) == "exit status 3"
    assert "did not start" in run_step(Step("step", ["/no/such/program"], 5), tmp_path)


@pytest.mark.parametrize("deaf", [False, True])
def test_a_step_beyond_its_limit_is_ended(deaf: bool, tmp_path: Path) -> None:
    """With a chance to tidy up; without more patience when it does not take it."""
    code = (
        "import signal, time, os\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        # Said in both cases: who is started in the background of a shell is deaf from birth.
        f"signal.signal(signal.SIGINT, signal.SIG_IGN if {deaf} else signal.default_int_handler)\n"
        "try: time.sleep(100)\n"
        "finally: print('tidied up')\n"
    )
    began = time.monotonic()
    endings = ((2, 1.0 if deaf else 30.0), (9, 30.0))
    assert run_step(python(code, limit_s=3), tmp_path, endings) == "ended at its limit of 3 s"
    assert time.monotonic() - began < 30
    assert ("tidied up" in (tmp_path / "step.log").read_text()) != deaf
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_failed_step_does_not_stop_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines, failed = run_steps([python("raise SystemExit(1)", name="one"), python("", name="two")], tmp_path)
    assert failed and lines[0].startswith("one: FAILED: exit status 1") and lines[1].startswith("two: ok")
    assert run_steps([python("", name="two")], tmp_path)[1] is False


def test_targets_are_cells_that_the_bench_measures() -> None:
    for target in TARGETS:
        assert target.cell in cells_of("all", gpus=[target.cell.gpus])
        assert set(target.methods) | set(target.against) <= set(NAMES)
    assert not set(OURS) & set(BASELINES) and {*OURS, *BASELINES, "floor"} == set(NAMES)
    assert measure_gpus.PAPER_EIGHT == pytest.approx(1.71, abs=0.005)


def test_judging() -> None:
    sharded = next(t for t in TARGETS if t.cell == Cell(4, 4, 1024, 8192, 8192))
    other = [record(Cell(4, 4, 4096, 8192, 8192), "sharded", 1.0), record(sharded.cell, "sharded", 1.0, timing="eager")]
    assert judge(sharded, other).endswith("sharded: not measured, target at most 1.15 of the floor")
    assert "1.150 of the floor, target at most 1.15 of the floor: met" in judge(
        sharded, [*other, record(sharded.cell, "sharded", 1.15)]
    )
    assert judge(sharded, [record(sharded.cell, "sharded", 1.151)]).endswith(": MISSED")


def test_judging_against_the_best_baseline() -> None:
    """The best of ours, whichever; the best of theirs, of either process set; the floor is nobody's."""
    (target,) = (t for t in TARGETS if t.against)
    ours = [record(target.cell, "sharded", 1.2), record(target.cell, "hybrid-tp", 1.1)]
    assert "not measured" in judge(target, ours)
    theirs = [
        record(target.cell, "floor", 1.0),
        record(target.cell, "tp-nccl", 1.9),
        record(target.cell, "async-tp", 1.4, process_set="torchrun"),
    ]
    assert "not measured" in judge(target, theirs)
    line = judge(target, [*ours, *theirs])
    assert "hybrid-tp: 0.786 of the best baseline (async-tp)" in line and line.endswith(": met")
    assert judge(target, [*ours, *theirs, record(target.cell, "weight-streaming", 1.2)]).endswith(": MISSED")


def test_no_results_or_bad_ones_are_said(tmp_path: Path) -> None:
    assert "cannot be read" in target_lines(4, tmp_path / "none.json")[0]
    (tmp_path / "half.json").write_text('{"schema"')
    assert "half written" in target_lines(4, tmp_path / "half.json")[0]


@pytest.mark.parametrize("status", [0, 1])
def test_the_whole(
    status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step writes the results, another fails or not; the summary has both, and the status is about the steps."""
    missed = [record(Cell(8, 8, 16384, 8192, 8192), "pipelined", 1.5)]
    made = results.Results({"gpu": "NVIDIA H200", "gpus": 8, "commit": "c"}, missed).to_json()
    (tmp_path / "made.json").write_text(json.dumps(made))
    copy = f"import shutil; shutil.copy({str(tmp_path / 'made.json')!r}, {str(tmp_path / 'o' / 'bench.json')!r})"
    steps = [python(f"raise SystemExit({status})", name="tests"), python(copy, name="bench")]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(measure_gpus, "steps_of", lambda *_: steps)
    monkeypatch.setattr(measure_gpus.signal, "signal", lambda *_: None)
    assert measure_gpus.main(["8", "--commit", "c", "--out", str(tmp_path / "o")]) == status
    summary = (tmp_path / "o" / "summary.txt").read_text()
    assert capsys.readouterr().out.endswith(summary)
    lines = summary.splitlines()
    assert lines[0].startswith("tests: FAILED" if status else "tests: ok") and lines[1].startswith("bench: ok")
    assert "M=16384, 8 x 8192, 8 GPUs: pipelined: 1.500 of the floor" in lines[2] and lines[2].endswith(": MISSED")
    assert "(the paper's on B200 against one GPU: 1.71)" in lines[2]
    assert "not measured" in lines[3] and len(lines) == 4
