"""A trace as one self-contained HTML page: summary, accounts, and a timeline per device. No scripts, no network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template

from tilerelay.errors import InvalidInput
from tilerelay.trace.events import Trace
from tilerelay.trace.path import critical_path
from tilerelay.trace.picture import COLOURS, PATH_COLOUR, slug, timeline
from tilerelay.trace.spans import CATEGORIES, partition
from tilerelay.trace.summary import Summary, summarise
from tilerelay.trace.text import amount, clock_text, gigabytes_per_second, run_text

TEMPLATE = Path(__file__).with_name("page.html")
EXPLAINED = {
    "flight": "flight: from a prerequisite's publication until the tile's worker saw it",
    "turn": "turn: from the worker's tile before until this one was taken",
}


def to_html(trace: Trace, title: str = "Every tile of a run") -> str:
    """The page."""
    summary, cut, steps = summarise(trace), partition(trace), critical_path(trace)
    pictures = []
    for device in summary.devices:
        name = f"{device.name}: {', '.join(device.stages)}, {device.workers} workers"
        pictures.append(f"<h2>{escape(name)}</h2>{timeline(trace, cut, steps, device.device)}")
    warnings = ""
    if summary.backward:
        warnings = f'<p class="warning">{summary.backward} tiles have events in the wrong order.</p>'
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=escape(title),
        facts=f"{escape(run_text(trace))}<br>{escape(clock_text(trace.clock))}",
        warnings=warnings,
        colours="\n".join(
            f".{slug(name)} {{ stroke: {c}; fill: {c}; background: {c}; }}"
            for name, c in {**COLOURS, "path": PATH_COLOUR}.items()
        ),
        summary=_summary(summary),
        accounts=_accounts(summary),
        legend="".join(f'<span class="key {slug(name)}"></span>{name}' for name in (*CATEGORIES, "path")),
        timelines="\n".join(pictures),
        path=_path(summary),
    )


def write(trace: Trace, path: Path, title: str = "Every tile of a run") -> None:
    """Write the page to a file.

    Raises:
        InvalidInput: it cannot be written.
    """
    try:
        path.write_text(to_html(trace, title), encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"{path}: cannot be written ({error.strerror})") from None


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return f"<table>{line(head, 'th')}{''.join(line(row, 'td') for row in rows)}</table>"


def _summary(summary: Summary) -> str:
    names = {d.device: d.name for d in summary.devices}
    rows = [
        ("whole run", amount(summary.total, summary.unit), "100 %"),
        *(
            (name, amount(time, summary.unit), f"{100 * time / max(1, summary.total):.1f} %")
            for name, time in (
                ("ramp: until every device has a tile", summary.ramp),
                ("steady state", summary.steady),
                ("tail: since the first device is done", summary.tail),
            )
        ),
        ("idle share of all workers", "", f"{100 * summary.idle:.1f} %"),
    ]
    for link in summary.links:
        way = f"{names[link.source]} to {names[link.target]}"
        rows.append((way, f"{link.bytes / 1e6:.1f} MB", gigabytes_per_second(link, summary.unit)))
    return _table(("", "", ""), rows)


def _accounts(summary: Summary) -> str:
    rows = [
        (
            d.name, str(d.tiles), amount(d.begin, summary.unit), amount(d.end, summary.unit),
            *(f"{100 * d.share[name]:.2f} %" for name in CATEGORIES),
        )
        for d in summary.devices
    ]  # fmt: skip
    return _table(("", "tiles", "first tile", "last tile", *CATEGORIES), rows)


def _path(summary: Summary) -> str:
    total = max(1, sum(summary.path.values()))
    rows = [
        (EXPLAINED.get(name, name), amount(time, summary.unit), f"{100 * time / total:.1f} %")
        for name, time in summary.path.items()
    ]
    chain = ", then ".join(f"{tiles} of {stage}" for stage, tiles in summary.path_tiles)
    return f"<p>Tiles on it: {escape(chain)}.</p>{_table(('part', 'time', 'share'), rows)}"
