"""`tilerelay bench` and `tilerelay bench-report`: measure, and make a report of what was measured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilerelay.errors import InvalidInput, UnsupportedMachine

if TYPE_CHECKING:
    from tilerelay.bench.records import Record

BAD_INPUT = 2
FAILED = 1


def machine_facts(commit: str | None) -> dict[str, Any]:
    """The facts of this machine (a function of its own so that tests can stand in for a machine)."""
    from tilerelay.bench.machine import facts

    return facts(commit)


def bench(
    suite: Annotated[
        str, typer.Option(help="paper-fig4, paper-fig5, paper-table1, paper-fig7, latency, mlp, quick or all")
    ] = "quick",
    gpus: Annotated[str, typer.Option(help="only cells on these numbers of GPUs: 2 or 2,4")] = "",
    m: Annotated[str, typer.Option(help="only these batch sizes of the suite: 1024,4096")] = "",
    methods: Annotated[str, typer.Option(help="only these methods (the floor always): tp-nccl,pipelined")] = "",
    rounds: Annotated[int, typer.Option(help="timed rounds per cell, after three to warm up")] = 12,
    timing: Annotated[str, typer.Option(help="graph: CUDA graphs; eager: launches one by one")] = "graph",
    out: Annotated[Path | None, typer.Option(help="results file; an existing one is gone on with")] = None,
    commit: Annotated[str | None, typer.Option(help="the commit that is measured, for the results file")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the results as JSON")] = False,
) -> None:
    """Measure our method and what an expert would use instead, on the same work, in the same rounds."""
    with _one_line_errors("bench"):
        from tilerelay.bench.run import Request, run

        request = Request(suite, _numbers("--gpus", gpus), _numbers("--m", m), _names(methods), rounds, timing, out)
        machine = machine_facts(commit)
        results, asked = run(request, machine, say=_say)
        if as_json:
            typer.echo(json.dumps({**results.to_json(), "records": [r.to_json() for r in asked]}, indent=1))
        else:
            _print_tables(asked)
    if not asked:
        _say("bench: nothing was measured")
        raise typer.Exit(FAILED)
    if any(record.status == "error" for record in asked):
        raise typer.Exit(FAILED)


def bench_report(
    results: Annotated[list[Path], typer.Argument(help="results files of tilerelay bench")],
    out: Annotated[Path, typer.Option(help="folder for report.md and the plots")] = Path("bench-report"),
) -> None:
    """Make a report of results files: Markdown tables and plots, beside the paper's figures."""
    with _one_line_errors("bench-report"):
        from tilerelay.bench.report import write_report

        for path in write_report(results, out):
            typer.echo(path)


@contextmanager
def _one_line_errors(command: str) -> Iterator[None]:
    """What the user can mend is one line on standard error, without a traceback."""
    try:
        yield
    except InvalidInput as error:
        _say(f"tilerelay {command}: {' '.join(str(error).split())}")
        raise typer.Exit(BAD_INPUT) from None
    except UnsupportedMachine as error:
        _say(f"tilerelay {command}: {' '.join(str(error).split())}")
        raise typer.Exit(FAILED) from None


def _say(line: str) -> None:
    typer.echo(line, err=True)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _numbers(option: str, text: str) -> tuple[int, ...]:
    """Raises InvalidInput: not whole positive numbers separated by commas."""
    numbers = []
    for name in _names(text):
        if not name.isascii() or not name.isdigit() or int(name) == 0:
            raise InvalidInput(f"{option} {text!r}: give whole positive numbers separated by commas")
        numbers.append(int(name))
    return tuple(numbers)


def _print_tables(records: list[Record]) -> None:
    from tilerelay.bench.report_tables import latency_table, reduction_table, troubles
    from tilerelay.bench.series import series_of

    for series in series_of(records):
        typer.echo(f"\n{series.title}: median us (ratio to floor, best variant)\n")
        typer.echo(latency_table(series))
        reductions = reduction_table(series)
        if reductions:
            typer.echo(f"\n{reductions}")
    for line in troubles(records):
        _say(line)
