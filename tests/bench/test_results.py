"""Results files: what is refused, what is resumed, and that nothing is merged in silence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tilerelay.baselines.cell import Cell
from tilerelay.bench import results
from tilerelay.bench.records import CellKey, Record, blank
from tilerelay.bench.results import Results
from tilerelay.bench.run import Request, make_plan
from tilerelay.errors import InvalidInput

MakeResults = Callable[..., Results]


@pytest.fixture
def path(tmp_path: Path, make_results: MakeResults) -> Path:
    file = tmp_path / "results.json"
    results.save(make_results(1024, 4096), file)
    return file


def edit(path: Path, change: Callable[[Any], None]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def test_what_is_saved_is_loaded(path: Path, make_results: MakeResults) -> None:
    assert results.load(path) == make_results(1024, 4096)
    assert [p.name for p in path.parent.iterdir()] == ["results.json"]  # no half-written file stays


def test_a_record_says_at_least_what_was_agreed(path: Path) -> None:
    data = json.loads(path.read_text())
    wanted = "suite method chunk gpus layers m n k median_us min_us max_us ratio_to_floor sm_clock_mhz paper_us"
    assert all({*wanted.split(), "paper_reduction"} <= set(record) for record in data["records"])
    assert {"gpu", "driver", "torch", "triton", "commit"} <= set(data["machine"])


@pytest.mark.parametrize("length", [0, 1, 100, 2000])
def test_a_half_written_file_is_refused(path: Path, length: int) -> None:
    path.write_text(path.read_text()[:length])
    with pytest.raises(InvalidInput, match="perhaps half written"):
        results.load(path)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda d: d.update(schema=0), "another version"),
        (lambda d: d.update(schema=2), "another version"),
        (lambda d: d.pop("schema"), "not a results file"),
        (lambda d: d.pop("machine"), "not a results file"),
        (lambda d: d.update(machine={}), "which machine"),
        (lambda d: d.update(records={}), "not a list"),
        (lambda d: d["records"].append(17), "not an object"),
        (lambda d: d["records"][0].pop("median_us"), "other fields.*median_us"),
        (lambda d: d["records"][0].update(colour="red"), "other fields.*colour"),
        (lambda d: d["records"][0].update(median_us=None), "ok without figures"),
        (lambda d: d["records"][0].update(median_us=-1.0), "no positive number"),
        (lambda d: d["records"][0].update(median_us="fast"), "no positive number"),
        (lambda d: d["records"][0].update(ratio_to_floor=float("nan")), "no positive number"),
        (lambda d: d["records"][0].update(min_us=1e9), "lies outside"),
        (lambda d: d["records"][0].update(status="fine"), "none of ok"),
        (lambda d: d["records"][0].update(status="error"), "without a reason"),
        (lambda d: d["records"][0].update(timing="hourglass"), "none of graph"),
        (lambda d: d["records"][0].update(m=0), "m=0"),
        (lambda d: d["records"][0].update(m="1024"), "m='1024'"),
        (lambda d: d["records"][0].update(suite="quick"), "not a list of names"),
        (lambda d: d["records"][0].update(method=None), "not text"),
        (lambda d: d["records"][0].update(sweep=[1]), "sweep"),
        (lambda d: d["records"].append(d["records"][0]), "two records"),
    ],
)
def test_bad_files_are_refused_with_a_reason(path: Path, change: Callable[[Any], None], why: str) -> None:
    edit(path, change)
    with pytest.raises(InvalidInput, match=why) as caught:
        results.load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("text", ["[]", "null", '"results"', "{}"])
def test_other_json_is_refused(path: Path, text: str) -> None:
    path.write_text(text)
    with pytest.raises(InvalidInput, match="not a results file"):
        results.load(path)


def test_a_missing_file_is_refused_by_load_and_new_to_resume(tmp_path: Path, machine: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="cannot be read"):
        results.load(tmp_path / "none.json")
    assert results.resume(tmp_path / "none.json", machine).records == []
    assert results.resume(None, machine).records == []


@pytest.mark.parametrize("fact", results.IDENTITY)
def test_another_machine_version_or_commit_is_not_resumed(path: Path, machine: dict[str, Any], fact: str) -> None:
    machine[fact] = "other"
    with pytest.raises(InvalidInput, match=f"another machine or version.*{fact} .*/ other.*give another --out"):
        results.resume(path, machine)


def test_several_files_of_one_machine_are_one_and_others_stay_apart(tmp_path: Path, make_results: MakeResults) -> None:
    a, b, c = tmp_path / "a.json", tmp_path / "b.json", tmp_path / "c.json"
    results.save(make_results(1024), a)
    results.save(make_results(4096), b)
    elsewhere = make_results(1024)
    elsewhere.machine = {**elsewhere.machine, "host": "ffffffff"}
    results.save(elsewhere, c)
    loaded = results.load_all([a, b, c])
    assert [len(r.records) for r in loaded] == [24, 12]
    assert {r.m for r in loaded[0].records} == {1024, 4096}
    with pytest.raises(InvalidInput, match="also in an earlier file"):
        results.load_all([a, a])


def test_a_cell_is_replaced_as_a_whole(make_results: MakeResults) -> None:
    have = make_results(1024)
    cell = Cell(2, 2, 1024, 8192, 8192)
    key = CellKey(cell, "one-process", "graph")
    have.put(key, [blank(cell, "floor", "one-process", "graph", "error", "boom")])
    assert have.measured(key) == {"floor"}
    assert have.measured(CellKey(cell, "torchrun", "graph")) == {"floor", "tp-nccl", "tp-two-shot", "async-tp"}


def plan_of(have: Results, gpus: int = 2, **request: Any) -> tuple[dict[str, list[tuple[int, int]]], list[str]]:
    plan = make_plan(Request(**request), gpus, have)
    return {s: [(j.cell.gpus, j.cell.m) for j in jobs] for s, jobs in plan.jobs.items()}, plan.skipped


def test_cells_that_are_there_are_not_measured_again(make_results: MakeResults) -> None:
    names = ("floor", "tp-nccl", "async-tp")
    jobs, skipped = plan_of(make_results(1024, 2048), suite="paper-fig5", names=names)
    assert jobs == {s: [(2, m) for m in (4096, 8192, 16384, 32768)] for s in ("one-process", "torchrun")}
    assert sum(line.startswith("already measured") for line in skipped) == 4


def test_a_cell_that_lacks_a_method_is_measured_again_with_all_it_had(make_results: MakeResults) -> None:
    plan = make_plan(Request(suite="quick", names=("tp-nccl-chunked",)), 2, make_results(4096))
    (job,) = plan.jobs["one-process"]
    assert set(job.methods) == {r.method for r in make_results(4096).records if r.process_set == "one-process"} | {
        "tp-nccl-chunked"
    }


def test_eager_figures_do_not_stand_in_for_graphs(make_results: MakeResults) -> None:
    jobs, _ = plan_of(make_results(4096), suite="quick", names=("floor",), timing="eager")
    assert jobs == {"one-process": [(2, 4096)]}


def test_cells_that_need_more_gpus_are_skipped_visibly(machine: dict[str, Any]) -> None:
    jobs, skipped = plan_of(Results(machine), suite="paper-table1")
    assert jobs == {"one-process": [(1, 16384), (2, 16384)], "torchrun": [(2, 16384)]}
    assert "skipped M=16384, 4 x 8192, 4 GPUs: this machine has 2 GPUs" in skipped
    jobs, skipped = plan_of(Results(machine), gpus=0, suite="all")
    assert jobs == {} and len(skipped) > 10


def test_records_reject_what_is_no_record() -> None:
    with pytest.raises(InvalidInput):
        Record.from_json([1, 2])
