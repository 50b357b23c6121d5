"""The report and README's table, from a small made-up results file."""

from __future__ import annotations

import importlib.util
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tilerelay.baselines.cell import Cell
from tilerelay.bench import report_plots, report_tables, results
from tilerelay.bench.methods import NAMES, TORCHRUN
from tilerelay.bench.records import blank
from tilerelay.bench.report import write_report
from tilerelay.bench.results import Results
from tilerelay.bench.series import Row, parts_of, series_of
from tilerelay.errors import InvalidInput

MakeResults = Callable[..., Results]


def load_script() -> Any:
    path = Path(__file__).resolve().parents[2] / "scripts" / "readme_table.py"
    spec = importlib.util.spec_from_file_location("readme_table", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def path(tmp_path: Path, make_results: MakeResults) -> Path:
    file = tmp_path / "results.json"
    results.save(make_results(1024, 4096, 16384), file)
    return file


def test_the_report_has_page_and_pictures(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "report"
    written = write_report([path], out)
    assert written[0].name == "report.md" and sorted(p.name for p in out.iterdir()) == sorted(p.name for p in written)
    assert {p.suffix for p in written[1:]} == {".png", ".svg"} and len(written) == 7
    for file in written[1:]:
        if file.suffix == ".svg":
            ElementTree.parse(file)
        else:
            assert file.read_bytes().startswith(b"\x89PNG")
    page = written[0].read_text()
    for picture in ("latency-2gpu-2x8192.png", "reduction-2gpu-2x8192.png", "parts-8192-8192-8192.png"):
        assert f"({picture})" in page
    assert "NVIDIA H200" in page and "commit abc1234" in page
    assert "| pipelined |" in page and "1.15x" in page


def test_the_same_results_make_the_same_files(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    one, two = write_report([path], tmp_path / "one"), write_report([path], tmp_path / "two")
    assert [p.read_bytes() for p in one if p.suffix != ".png"] == [p.read_bytes() for p in two if p.suffix != ".png"]


def test_machines_are_marked_and_kept_apart(path: Path, tmp_path: Path, make_results: MakeResults) -> None:
    pytest.importorskip("matplotlib")
    elsewhere = make_results(4096)
    elsewhere.machine = {**elsewhere.machine, "gpu": "NVIDIA B200"}
    other = tmp_path / "other.json"
    results.save(elsewhere, other)
    page = write_report([path, other], tmp_path / "report")[0].read_text()
    assert "do not compare figures across" in page and page.count("\n## ") == 2
    assert report_tables.readme_table(results.load_all([path, other])).count("| M |") == 2


def test_nothing_to_report(tmp_path: Path, machine: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="at least one"):
        write_report([], tmp_path)
    results.save(Results(machine), tmp_path / "empty.json")
    with pytest.raises(InvalidInput, match="no records"):
        write_report([tmp_path / "empty.json"], tmp_path)


def test_reductions_come_from_ratios_not_latencies(make_results: MakeResults) -> None:
    """async-tp: 1.13 of its own floor, which is faster in microseconds than ours."""
    (series,) = series_of(make_results(4096).records)
    assert series.reduction(Row("async-tp", TORCHRUN), 4096) == pytest.approx(1 - 1.15 / 1.13)
    text = report_tables.reduction_table(series)
    assert "| tp-nccl | 14.8 % (paper 23.9 %) |" in text
    assert "| microbatch-direct | 17.9 % (paper 18.3 %) |" in text
    assert "| async-tp | -1.8 % |" in text


def test_latency_cells(make_record: Callable[..., Any]) -> None:
    cell = Cell(2, 2, 4096, 8192, 8192)
    sweep = [{"label": "chunks of 256"}, {"label": "chunks of 512"}]
    record = make_record(cell, "microbatch-copy", us=1063.4, ratio_to_floor=1.347, variant="chunks of 512", sweep=sweep)
    assert report_tables.latency_cell(record) == "1063 (1.35x, chunks of 512)"
    record.reason = "chunks of 256: boom"
    assert report_tables.latency_cell(record) == "1063* (1.35x, chunks of 512)"
    record.sweep = [{"label": "whole"}, {"label": "part", "compute_only": True}]
    record.reason, record.note = None, "shares"
    assert report_tables.latency_cell(record) == "1063+ (1.35x)"
    assert report_tables.latency_cell(None) == ""
    assert report_tables.latency_cell(blank(cell, "x", "one-process", "graph", "error", "boom")) == "failed"
    assert report_tables.latency_cell(blank(cell, "x", "one-process", "graph", "skipped", "odd")) == "-"


def test_failures_are_in_the_report(
    path: Path, tmp_path: Path, machine: dict[str, Any], make_results: MakeResults
) -> None:
    pytest.importorskip("matplotlib")
    have = make_results(4096)
    have.records.append(
        blank(Cell(2, 2, 4096, 8192, 8192), "tp-nccl-chunked", "one-process", "graph", "error", "NCCL broke")
    )
    results.save(have, path)
    page = write_report([path], tmp_path / "report")[0].read_text()
    assert "- failed: tp-nccl-chunked, M=4096, 2 x 8192, 2 GPUs: NCCL broke" in page


def test_parts_add_up(make_results: MakeResults) -> None:
    parts = parts_of(make_results(4096).records)
    assert [p.row.method for p in parts] == ["tp-nccl", "tp-nccl", "hybrid-tp"][: len(parts)] and len(parts) == 3
    records = {(r.method, r.process_set): r for r in make_results(4096).records}
    for p in parts:
        total = records[p.row.method, p.row.process_set].median_us
        assert p.compute_us + p.communication_us == pytest.approx(total)


def test_every_method_looks_different_without_colour() -> None:
    looks = []
    for row in [*(Row(name, "one-process") for name in NAMES), Row("tp-nccl", TORCHRUN)]:
        style = report_plots.style_of(row)
        filled = style.get("markerfacecolor") != "none"
        looks.append((style["linestyle"], style["marker"], style["linewidth"], filled))
    assert len(set(looks)) == len(looks)


def test_readme_table(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = load_script()
    readme = tmp_path / "README.md"
    readme.write_text(f"# Title\n\n{script.BEGIN}\nold\n{script.END}\n\nThe end.\n")
    arguments = [str(path), "--readme", str(readme)]
    assert script.main([*arguments, "--check"]) == 1
    assert script.main(arguments) == 0
    text = readme.read_text()
    assert text.startswith("# Title\n") and text.endswith("\n\nThe end.\n") and "old" not in text
    (row,) = [line for line in text.splitlines() if line.startswith("| 4096 | 819 |")]
    assert row.endswith("| 2.02 | 1.15 |  |  | 1.23 | 1.35 | 1.30 | 1.13 | 1.05 | 1700 / 1700 |")
    assert script.main([*arguments, "--check"]) == 0
    assert script.main(arguments) == 0 and readme.read_text() == text  # again changes nothing
    capsys.readouterr()


@pytest.mark.parametrize("page", ["no markers", "{END} {BEGIN}", "{BEGIN} {BEGIN} {END}", "{BEGIN}"])
def test_a_page_without_its_markers_is_refused(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], page: str
) -> None:
    script = load_script()
    readme = tmp_path / "README.md"
    readme.write_text(page.format(BEGIN=script.BEGIN, END=script.END))
    before = readme.read_text()
    assert script.main([str(path), "--readme", str(readme)]) == 2
    assert readme.read_text() == before and len(capsys.readouterr().err.splitlines()) == 1


def test_the_script_refuses_bad_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = load_script()
    (tmp_path / "r.json").write_text("{")
    assert script.main([str(tmp_path / "r.json")]) == 2
    assert "half written" in capsys.readouterr().err
