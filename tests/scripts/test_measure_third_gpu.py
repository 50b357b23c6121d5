"""scripts/measure_third_gpu.py as far as it goes without GPUs: its refusal, its cases, its records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from scripts import measure_third_gpu
from scripts.measure_third_gpu import CASES, FULL, GEMMS, IN, OUT, PIPELINE, Timed, line, records


@pytest.mark.parametrize("count", [0, 2])
def test_fewer_than_three_gpus_is_one_line_and_status_2(
    count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(SystemExit) as caught:
        measure_third_gpu.main(["--commit", "c", "--out", str(tmp_path / "r.json")])
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"measure_third_gpu: needs 3 GPUs, this machine has {count}\n"
    assert list(tmp_path.iterdir()) == []


def test_cases() -> None:
    """Each work alone, the pair against both copies both ways, and the controls."""
    works = {work for work, _ in CASES}
    assert len(set(CASES)) == len(CASES) and {(work, "") for work in works} <= set(CASES)
    for copy in (OUT, IN):
        assert {(copy, PIPELINE), (PIPELINE, copy), (copy, GEMMS), (GEMMS, copy), (copy, FULL)} <= set(CASES)


def test_records() -> None:
    sent = {OUT: 400_000_000, PIPELINE: 16384 * 8192 * 2, GEMMS: 0}
    times = {
        (OUT, ""): [Timed(1000.0, True)] * 3,
        (OUT, PIPELINE): [Timed(1900.0, True), Timed(2000.0, True), Timed(2500.0, False)],
        (GEMMS, ""): [Timed(2500.0, True)] * 3,
        (PIPELINE, ""): [Timed(3000.0, True)] * 3,
        (PIPELINE, OUT): [Timed(3030.0, True)] * 3,
    }
    found = {(r["work"], r["beside"]): r for r in records(16384, times, sent, False)}
    json.dumps(list(found.values()))
    alone, beside = found[OUT, None], found[OUT, PIPELINE]
    assert (alone["gb_per_s"], alone["time_against_alone"], alone["covered_rounds"]) == (400.0, 1.0, None)
    assert (beside["median_us"], beside["min_us"], beside["max_us"]) == (2000.0, 1900.0, 2500.0)
    assert (beside["gb_per_s"], beside["time_against_alone"], beside["covered_rounds"]) == (200.0, 2.0, 2)
    assert found[GEMMS, None]["gb_per_s"] is None and beside["bit_equal"] is None
    assert "beside it in 2 of 3 rounds only" in line(beside) and "2.000 of alone" in line(beside)
    assert "400 GB/s" in line(alone) and line(alone).endswith("1.000 of alone")
    assert line(found[PIPELINE, OUT]).endswith("1.010 of alone  WRONG RESULT")
