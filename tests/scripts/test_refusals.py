"""Scripts that measure on GPUs refuse in one line where there are too few, before they write anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from scripts import measure_gemm, measure_main_job

Main = Callable[[Sequence[str]], None]


@pytest.mark.parametrize(
    ("main", "count", "what"),
    [
        (measure_gemm.main, 0, "measure_gemm: needs a Hopper GPU, this machine has none\n"),
        (measure_main_job.main, 0, "measure_main_job: needs 2 GPUs, this machine has 0\n"),
        (measure_main_job.main, 1, "measure_main_job: needs 2 GPUs, this machine has 1\n"),
    ],
)
def test_too_few_gpus(
    main: Main, count: int, what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(SystemExit) as caught:
        main(["--commit", "c", "--out", str(tmp_path / "r.json")])
    assert caught.value.code == 2
    assert capsys.readouterr().err == what
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", [["--out", "{tmp}/none/r.json"], ["--out", "{tmp}/r.json", "--rounds", "0"]])
def test_arguments_are_checked_before_anything_is_measured(
    wrong: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SystemExit) as caught:
        measure_gemm.main(["--commit", "c", *(word.format(tmp=tmp_path) for word in wrong)])
    assert caught.value.code == 2 and "needs a folder that exists" in capsys.readouterr().err
