"""Suites and the paper's figures: against the tables as the paper prints them."""

from __future__ import annotations

import pytest

from tilerelay.baselines.cell import Cell
from tilerelay.bench import methods, paper
from tilerelay.bench.suites import SUITES, cells_of, suites_of
from tilerelay.errors import InvalidInput

# Copied from the paper on their own, so that a slip in one of the two places shows.
TABLE_1 = "1 1080 1080 -\n2 1640 1165 29.0%\n4 2636 1418 46.2%\n8 4493 1844 59.0%"
FIGURE_5 = "1024 1.3% 1.9%\n2048 9.1% 6.3%\n4096 18.3% 23.9%\n8192 26.3% 25.1%\n16384 31.8% 29.0%\n32768 22.7% 29.6%"
FIGURE_4 = "2 31.8%\n4 30.0%\n8 23.4%"


def rows(text: str) -> list[list[float]]:
    return [[0.0 if c == "-" else float(c.strip("%")) for c in line.split()] for line in text.splitlines()]


def percent(value: float | None) -> float:
    return 0.0 if value is None else round(100 * value, 1)


def test_table_1() -> None:
    for gpus, tp, cta, saved in rows(TABLE_1):
        cell = Cell(int(gpus), int(gpus), 16384, 8192, 8192)
        assert cell in SUITES["paper-table1"]
        assert paper.paper_us(cell, "pipelined") == cta
        assert paper.paper_us(cell, "tp-nccl" if gpus > 1 else "sequential") == tp
        assert percent(paper.paper_reduction(cell, "tp-nccl")) == saved
        if gpus > 1:
            assert round(100 * (1 - cta / tp), 1) == pytest.approx(saved, abs=0.06)
    assert len(SUITES["paper-table1"]) == 4


def test_figure_4() -> None:
    for gpus, saved in rows(FIGURE_4):
        cell = Cell(int(gpus), int(gpus), 16384, 8192, 8192)
        assert cell in SUITES["paper-fig4"]
        assert percent(paper.paper_reduction(cell, "microbatch-direct")) == saved
    assert len(SUITES["paper-fig4"]) == 3


def test_figure_5() -> None:
    for m, against_mb, against_tp in rows(FIGURE_5):
        cell = Cell(2, 2, int(m), 8192, 8192)
        assert cell in SUITES["paper-fig5"]
        assert percent(paper.paper_reduction(cell, "microbatch-direct")) == against_mb
        assert percent(paper.paper_reduction(cell, "tp-nccl")) == against_tp
    assert len(SUITES["paper-fig5"]) == 6


def test_figure_7_and_quick() -> None:
    assert {(c.gpus, c.m) for c in SUITES["paper-fig7"]} == {(g, m) for g in (2, 4, 8) for m in (4096, 8192, 16384)}
    assert all(c.layers == 2 for c in SUITES["paper-fig7"])
    assert SUITES["quick"] == (Cell(2, 2, 4096, 8192, 8192),)


@pytest.mark.parametrize("gpus", [4, 8])
def test_more_gpus_have_every_batch_size(gpus: int) -> None:
    cells = cells_of("all", gpus=[gpus])
    for layers in (2, gpus):
        ms = [c.m for c in cells if (c.layers, c.n) == (layers, 8192)]
        assert ms == [1024, 2048, 4096, 8192, 16384, 32768]
    assert suites_of(Cell(gpus, gpus, 16384, 8192, 8192)) == ["paper-fig4", "paper-table1", "latency"]
    assert suites_of(Cell(gpus, 2, 4096, 8192, 8192)) == ["paper-fig7", "latency"]
    assert suites_of(Cell(gpus, 2, 1024, 8192, 8192)) == ["latency"]
    assert [c.m for c in cells if c.n == 28672] == [512, 1024, 2048, 4096, 8192]


def test_the_paper_says_nothing_about_other_cells_and_methods() -> None:
    other = Cell(2, 2, 4096, 28672, 8192)
    for method in methods.NAMES:
        assert paper.paper_us(other, method) is None and paper.paper_reduction(other, method) is None
    cell = Cell(2, 2, 4096, 8192, 8192)
    assert paper.paper_us(cell, "pipelined") is None
    assert paper.paper_reduction(cell, "weight-streaming") is None
    assert paper.paper_reduction(Cell(4, 2, 16384, 8192, 8192), "tp-nccl") is None


def test_shared_cells_are_measured_once_and_carry_all_their_suites() -> None:
    everything = cells_of("all")
    assert len(everything) == len(set(everything))
    shared = Cell(2, 2, 16384, 8192, 8192)
    assert suites_of(shared) == ["paper-fig4", "paper-fig5", "paper-table1", "paper-fig7", "latency"]
    two_gpus = cells_of("all", gpus=[2])
    assert [c.m for c in two_gpus if c.n == c.k] == [512, 1024, 2048, 4096, 8192, 16384, 32768]
    assert [(c.m, c.n) for c in two_gpus if c.n != c.k] == [(m, 28672) for m in (512, 1024, 2048, 4096, 8192)]
    assert cells_of("all", gpus=[2], ms=[16384]) == [Cell(2, 2, 16384, 8192, 8192)]


def test_unknown_names_and_sizes() -> None:
    with pytest.raises(InvalidInput, match="unknown suite 'paper-fig9'; choose one of paper-fig4"):
        cells_of("paper-fig9")
    with pytest.raises(InvalidInput, match="no cell with GPUs=3; it has 2"):
        cells_of("quick", gpus=[3])
    with pytest.raises(InvalidInput, match="no cell with M=777"):
        cells_of("paper-fig5", ms=[777])
    with pytest.raises(InvalidInput, match="no cell with both"):
        cells_of("all", gpus=[1], ms=[32768])


def test_methods_are_chosen_by_process_set() -> None:
    everything = methods.choose([])
    assert everything == {k: list(v) for k, v in methods.PROCESS_SETS.items()}
    assert methods.choose(["pipelined"]) == {"one-process": ["floor", "pipelined"]}
    assert methods.choose(["tp-nccl"]) == {"one-process": ["floor", "tp-nccl"]}
    assert methods.choose(["async-tp"]) == {"torchrun": ["floor", "async-tp"]}
    both = methods.choose(["async-tp", "tp-nccl"])
    assert both == {"one-process": ["floor", "tp-nccl"], "torchrun": ["floor", "tp-nccl", "async-tp"]}
    with pytest.raises(InvalidInput, match="unknown method 'tp'; choose from floor, sequential,"):
        methods.choose(["tp"])


def test_every_name_is_one_method() -> None:
    one, ranks = methods.PROCESS_SETS["one-process"], methods.PROCESS_SETS["torchrun"]
    assert set(methods.NAMES) == {*one, *ranks}
    assert len(methods.NAMES) == len(set(methods.NAMES)) == 15
    for name in one:
        assert methods.make(name).name == name
        assert methods.make(name).lives.x and methods.make(name).lives.y
    for name in ranks:
        assert methods.make_rank(name).name == name
        assert methods.make_rank(name).lives.x and methods.make_rank(name).lives.y
