"""The report: a Markdown page and its plots, made of results files. Machines are kept apart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tilerelay.bench import report_plots as plots
from tilerelay.bench import report_tables as tables
from tilerelay.bench.results import Results, load_all, machine_name
from tilerelay.bench.series import Series, parts_of, series_of
from tilerelay.errors import InvalidInput

PAGE = "report.md"

EXPLAINED = """\
Medians in microseconds; in brackets the ratio to the floor of the same rounds and, for swept methods, the best variant.
The floor is cuBLAS on all GPUs at once without communication: the best of the cuts in its brackets. Methods with a
process per GPU have a floor of their own: across the two sets, ratios compare and microseconds do not. "failed" is
explained below; "-" makes no sense on that cell; `*` some variants failed; `+` has a note."""


def write_report(paths: Sequence[Path], out: Path) -> list[Path]:
    """Write report.md and the plots.

    Args:
        paths: results files; those of one machine and commit are put together, others get a section of their own.
        out: a folder; made if missing.

    Returns:
        The files written, the page first.

    Raises:
        InvalidInput: no files, a bad one, one with no records, or matplotlib is missing.
    """
    if not paths:
        raise InvalidInput("give at least one results file")
    everything = load_all(paths)
    if not any(results.records for results in everything):
        raise InvalidInput("the results files hold no records")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise InvalidInput("the report needs matplotlib; install tilerelay[report]") from None
    out.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    page = ["# Measurements", EXPLAINED]
    if len(everything) > 1:
        page.append(f"**{len(everything)} machines or versions: do not compare figures across their sections.**")
    for number, results in enumerate(everything):
        prefix = f"m{number + 1}-" if len(everything) > 1 else ""
        page += _section(results, out, prefix, written)
    path = out / PAGE
    path.write_text("\n\n".join(block for block in page if block) + "\n")
    return [path, *written]


def _section(results: Results, out: Path, prefix: str, written: list[Path]) -> list[str]:
    page = [f"## {machine_name(results.machine)}"]
    for series in series_of(results.records):
        page += _series(series, out, prefix, written)
    stated = tables.paper_table(results.records)
    if stated:
        page += ["### Latencies that the paper states", "On B200s, five runs averaged; here medians.", stated]
    parts = parts_of(results.records)
    if parts:
        page += [
            "### Computation and communication",
            "Communication is what the all-reduce adds to the same graph without it, in the same rounds. The paper's\n"
            "Figure 7 shows this split; its text has no numbers.",
            tables.parts_table(results.records),
        ]
        for widths in sorted({p.cell.widths for p in parts if p.cell.layers == 2}):
            chain = "-".join(str(w) for w in widths)
            files = plots.parts_plot([p for p in parts if p.cell.widths == widths], out, f"{prefix}parts-{chain}")
            written += files
            page.append(_picture("computation and communication", files))
    page += ["### Where X and Y live", tables.homes_table(results.records)]
    lines = tables.troubles(results.records)
    if lines:
        page += ["### Failures and notes", "\n".join(f"- {line}" for line in lines)]
    return page


def _series(series: Series, out: Path, prefix: str, written: list[Path]) -> list[str]:
    page = [f"### {series.title}", tables.latency_table(series)]
    files = plots.latency_plot(series, out, f"{prefix}latency-{series.slug}")
    page.append(_picture("latency", files))
    written += files
    reductions = tables.reduction_table(series)
    files = plots.reduction_plot(series, out, f"{prefix}reduction-{series.slug}")
    written += files
    if reductions:
        page += ["Latency saved, with the paper's figure for the same cell:", reductions, _picture("reduction", files)]
    page.append(
        f"<details><summary>Spread, clock, power, check</summary>\n\n{tables.details_table(series)}\n\n</details>"
    )
    return page


def _picture(text: str, files: Sequence[Path]) -> str:
    return f"![{text}]({files[0].name})" if files else ""
