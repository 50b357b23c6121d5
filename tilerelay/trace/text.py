"""Words and numbers for people: durations, rates, what ran on which clock, and a run's summary as lines of text."""

from __future__ import annotations

from tilerelay.trace.events import ClockInfo, Trace
from tilerelay.trace.spans import BUSY, IDLE
from tilerelay.trace.summary import LinkSummary, Summary, summarise


def amount(time: float, unit: str) -> str:
    """A duration in the unit in which it is easily read."""
    if unit != "ns":
        return f"{time:.0f} {unit}"
    for limit, divisor, name in ((1e3, 1.0, "ns"), (1e5, 1e3, "us"), (1e7, 1e3, "us"), (1e10, 1e6, "ms")):
        if time < limit:
            return f"{time / divisor:.{1 if limit == 1e5 else 0}f} {name}"
    return f"{time / 1e9:.1f} s"


def gigabytes_per_second(link: LinkSummary, unit: str) -> str:
    """Mean rate from the first tile's store to the last one's."""
    return f"{link.bytes / (link.end - link.begin):.1f} GB/s" if unit == "ns" and link.end > link.begin else ""


def clock_text(clock: ClockInfo) -> str:
    """What the times are worth."""
    text = f"clock: {clock.source}, shows {clock.granularity} {clock.unit}"
    if clock.error:
        text += f"; times on two devices agree within {amount(clock.error, clock.unit)}"
    return text


def run_text(trace: Trace) -> str:
    """What ran."""
    stages = ", ".join(
        f"{s.name} {s.grid.m}x{s.grid.n}x{s.k} ({s.kernel}, tiles of {s.grid.block_m}x{s.grid.block_n})"
        for s in trace.stages
    )
    facts = [str(trace.run[key]) for key in ("placement", "signalling") if key in trace.run]
    if "rows" in trace.run:
        facts.append("only tile rows {} to {}".format(trace.run["rows"][0], trace.run["rows"][1] - 1))
    return "; ".join([stages, *facts])


def summary_lines(trace: Trace) -> list[str]:
    """The summary for a terminal."""
    s = summarise(trace)
    lines = [run_text(trace), clock_text(trace.clock), ""]
    lines.append(
        f"run {amount(s.total, s.unit)} = ramp {amount(s.ramp, s.unit)} + steady {amount(s.steady, s.unit)} "
        f"+ tail {amount(s.tail, s.unit)}; workers idle {100 * s.idle:.1f} % of it"
    )
    if s.backward:
        lines.append(f"warning: {s.backward} tiles have events in the wrong order")
    names = {d.device: d.name for d in s.devices}
    for d in s.devices:
        busy = ", ".join(f"{name} {100 * d.share[name]:.1f}" for name in BUSY)
        idle = ", ".join(f"{name} {100 * d.share[name]:.1f}" for name in IDLE)
        lines.append(
            f"{d.name} ({', '.join(d.stages)}): {d.tiles} tiles on {d.workers} workers, "
            f"{amount(d.begin, s.unit)} to {amount(d.end, s.unit)}"
        )
        lines.append(f"    % of their time: {busy}; {idle}")
    for link in s.links:
        lines.append(f"{names[link.source]} -> {names[link.target]}: {_link_text(link, s)}")
    parts = ", ".join(f"{name} {amount(time, s.unit)}" for name, time in s.path.items())
    chain = ", then ".join(f"{tiles} of {stage}" for stage, tiles in s.path_tiles)
    return [*lines, f"critical path: {chain} tiles", f"    {parts}"]


def _link_text(link: LinkSummary, summary: Summary) -> str:
    rate = gigabytes_per_second(link, summary.unit)
    return f"{link.bytes / 1e6:.1f} MB" + (f", {rate}" if rate else "")
