"""The report's Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tilerelay.bench.methods import FLOOR, ONE_PROCESS, OURS, TORCHRUN
from tilerelay.bench.records import Record
from tilerelay.bench.results import Results, machine_name
from tilerelay.bench.series import Row, Series, parts_of, series_of


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *rows]]
    return "\n".join(lines)


def percent(fraction: float | None) -> str:
    return "" if fraction is None else f"{100 * fraction:.1f} %"


def microseconds(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


def latency_cell(record: Record | None) -> str:
    """ "1063 (1.35x, chunks of 512)", "failed", "-" (makes no sense here), or nothing (not measured)."""
    if record is None:
        return ""
    if record.status != "ok":
        return "failed" if record.status == "error" else "-"
    ratio = "" if record.ratio_to_floor is None else f"{record.ratio_to_floor:.2f}x"
    # Which candidate won is news only where there were several.
    several = sum(not entry.get("compute_only") for entry in record.sweep) > 1
    inside = ", ".join(text for text in (ratio, (record.variant or "") if several else "") if text)
    marks = "".join(mark for mark, on in (("*", record.reason), ("+", record.note)) if on)
    return f"{microseconds(record.median_us)}{marks} ({inside})" if inside else microseconds(record.median_us)


def latency_table(series: Series) -> str:
    """Methods against M: median us, ratio to the floor of the same process set, best variant."""
    rows = [[row.name, *(latency_cell(series.record(row, m)) for m in series.ms)] for row in series.rows]
    return table(["method", *(f"M={m}" for m in series.ms)], rows)


def reduction_table(series: Series) -> str:
    """Our reduction against every method, the paper's for the same cell in brackets; "" when we have none."""
    rows = []
    for row in series.rows:
        if row.method in (OURS, FLOOR):
            continue
        cells = []
        for m in series.ms:
            ours, record = series.reduction(row, m), series.record(row, m)
            paper = None if record is None else record.paper_reduction
            cells.append(percent(ours) + (f" (paper {percent(paper)})" if paper is not None else ""))
        if any(cells):
            rows.append([row.name, *cells])
    return table([f"{OURS} against", *(f"M={m}" for m in series.ms)], rows) if rows else ""


def paper_table(records: Sequence[Record]) -> str:
    """Latencies that the paper states, beside ours: another GPU, so only their relations compare."""
    rows = [
        [str(r.gpus), str(r.m), Row(r.method, r.process_set).name, microseconds(r.median_us), microseconds(r.paper_us)]
        for r in sorted(records, key=lambda r: (r.gpus, r.m))
        if r.paper_us is not None and r.status == "ok"
    ]
    return table(["GPUs", "M", "method", "us here", "us in the paper"], rows) if rows else ""


def parts_table(records: Sequence[Record]) -> str:
    rows = [
        [
            str(p.cell.gpus),
            str(p.cell.layers),
            str(p.cell.m),
            p.row.name,
            microseconds(p.compute_us + p.communication_us),
            microseconds(p.compute_us),
            microseconds(p.communication_us),
        ]
        for p in parts_of(records)
    ]
    return (
        table(["GPUs", "layers", "M", "method", "total us", "computation us", "communication us"], rows) if rows else ""
    )


def details_table(series: Series) -> str:
    """Every figure with its spread, clock, power and check."""
    rows = []
    for m in series.ms:
        for row in series.rows:
            r = series.ok(row, m)
            if r is None:
                continue
            spread = f"{r.median_us:.1f} ({r.min_us:.1f} to {r.max_us:.1f})"
            clock, power = microseconds(r.sm_clock_mhz) or "?", microseconds(r.power_w) or "?"
            check = "" if r.check_error is None else f"{r.check_error:.1e}"
            rows.append([str(m), row.name, r.variant or "", spread, clock, power, check])
    head = ["M", "method", "variant", "median (least to most) us", "SM MHz", "W", "row error"]
    return table(head, rows)


def homes_table(records: Sequence[Record]) -> str:
    """Where X and Y live, per method."""
    homes = {Row(r.method, r.process_set).name: (r.x_lives, r.y_lives, r.replicated) for r in records if r.x_lives}
    return table(["method", "X", "Y", "on more than one GPU"], [[name, *where] for name, where in homes.items()])


def troubles(records: Sequence[Record]) -> list[str]:
    """A line for everything that failed, wholly or in part, or needs a note."""
    lines = []
    for r in records:
        name = f"{Row(r.method, r.process_set).name}, {r.cell}"
        if r.status == "error":
            lines.append(f"failed: {name}: {r.reason}")
        elif r.status == "ok" and r.reason:
            lines.append(f"* partly failed: {name}: {r.reason}")
        if r.note:
            lines.append(f"+ {name}: {r.note}")
    return lines


# README's columns: (heading, methods of which the best counts).
README_COLUMNS: tuple[tuple[str, tuple[Row, ...]], ...] = (
    ("one GPU", (Row("sequential", ONE_PROCESS),)),
    ("pipelined", (Row(OURS, ONE_PROCESS),)),
    ("sharded, Y cut", (Row("sharded", ONE_PROCESS),)),
    ("sharded, Y on all", (Row("sharded-replicated", ONE_PROCESS),)),
    (
        "micro-batching, best chunk",
        (Row("microbatch-direct", ONE_PROCESS), Row("microbatch-copy", ONE_PROCESS)),
    ),
    (
        "tensor parallel (NCCL)",
        (Row("tp-nccl", ONE_PROCESS), Row("tp-nccl-chunked", ONE_PROCESS), Row("tp-nccl", TORCHRUN)),
    ),
    ("two-shot all-reduce", (Row("tp-two-shot", TORCHRUN),)),
    ("async-TP", (Row("async-tp", TORCHRUN), Row("async-tp-gathered", TORCHRUN))),
    ("weight streaming", (Row("weight-streaming", ONE_PROCESS),)),
)


def readme_table(all_results: Sequence[Results]) -> str:
    """README's tables: a line per cell, the floor in us and everything else as a ratio to it, machine by machine."""
    blocks = []
    for results in all_results:
        for series in series_of(results.records):
            if series.shape[0] < 2:
                continue
            rows = []
            for m in series.ms:
                floor = series.ok(Row(FLOOR, ONE_PROCESS), m)
                cells = [_best_ratio(series, candidates, m) for _, candidates in README_COLUMNS]
                us = microseconds(floor.median_us if floor else None)
                rows.append([str(m), us, *cells, _clocks(series, m)])
            head = ["M", "floor, us", *(heading for heading, _ in README_COLUMNS), "SM MHz, both sets"]
            blocks.append(f"{series.title} ({machine_name(results.machine)}):\n\n{table(head, rows)}")
    return "\n\n".join(blocks)


def _clocks(series: Series, m: int) -> str:
    """The SM clock while each process set's floor ran: the sets are comparable as far as these agree."""
    floors = [series.ok(Row(FLOOR, process_set), m) for process_set in (ONE_PROCESS, TORCHRUN)]
    return " / ".join(f"{f.sm_clock_mhz:.0f}" if f and f.sm_clock_mhz else "-" for f in floors)


def _best_ratio(series: Series, rows: Sequence[Row], m: int) -> str:
    records = [series.record(row, m) for row in rows]
    ratios = [r.ratio_to_floor for r in records if r is not None and r.status == "ok" and r.ratio_to_floor is not None]
    if ratios:
        return f"{min(ratios):.2f}"
    return "failed" if any(r is not None and r.status == "error" for r in records) else ""
