"""The overhead analysis as Markdown, beside the paper's figures (section III.C).

The report that it is given holds plain values:
    shape [m, n, k], commit, machine {gpu, ...}, clock {granularity_ns, error_ns}
    quantities  [{kernel, order, destination, run, name, **overhead.Quantity}]
    alone       [{kernel, order, destination, protocol, us {median, min, max}}]
    resources   [{kernel, protocol, registers, shared_bytes, spilled_bytes}]
    pipelined   [{kernel, order, latency_us, producer_end_us, consumer_end_us, consumer_begin_us}]
    tracing     [{kernel, off_us, on_us}]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tilerelay.trace.overhead import PAPER_US, QUANTITIES

OWN_ORDER = "own"
ORDERS = {OWN_ORDER: "the pipeline's own", "row-major": "row-major", "column-major": "column-major"}
PROTOCOLS = {"none": "no protocol", "producer": "producer", "consumer": "consumer"}
PAPER_ENDS = "1080 us alone, 1090 us as producer; the consumer ends at 1165 us (persistent, B200)"

EXPLANATION = """\
Why figures differ from the paper's, as far as the measurement itself says:

* T1 here starts when the tile's stores are complete; that wait is listed as *drain*. A fence that follows the stores
  at once, as the paper's, contains the wait: compare its T1 with T1 + drain.
* T2 is measured across two clocks; its error is at most that of their alignment (above). Producers write one word into
  the consumer's memory and consumers poll their own, with the same code in both kernels, so the kernel should not
  matter. The paper's classical kernel and its persistent one were measured on different GPUs, and it does not say what
  its 120 us consist of.
* T3 is the barrier of the role that polled and its proxy fence. In the persistent kernel that role is one warp.
* T4 has no cluster to broadcast over: the load warp fetches the tile itself. What remains is the latency of the first
  TMA load and of the barrier that hands it to the math, which is another thing than the broadcast of one word.
* The paper's persistent figures are a B200's; these are those of the machine named above.
"""


def markdown(report: Mapping[str, Any]) -> str:
    """The page."""
    m, n, k = report["shape"]
    clock = report["clock"]
    sections = [
        f"# Protocol overhead, GEMM {m} x {n} x {k}",
        f"{report['machine'].get('gpus')} x {report['machine'].get('gpu')}, bf16, commit {report['commit']}. "
        f"Medians over all tiles of a run, in brackets the 5th and 95th percentile, in microseconds. The devices' "
        f"clocks show {clock['granularity_ns']} ns and agree within {clock['error_ns'] / 1e3:.2f} us.",
        f"## T1 to T4\n\nPipelined placement on two GPUs, {report['signalling']} signalling, "
        "the pipeline's own tile order.",
        _quantities(report["quantities"]),
        EXPLANATION.rstrip(),
        "## Destination and producer order\n\nMedians, us. *alone*: nobody consumes, tiles are pushed into a queue; "
        "*pipelined*: with its consumer.",
        _by_order(report["quantities"]),
        "## The same GEMM with and without the protocol\n\nOne GPU computes, alone, with a queue; CUDA graphs, "
        "interleaved; us.",
        _alone(report["alone"]),
        _resources(report["resources"]),
        f"## The end of each stage\n\nFrom the first tile's start, us. The paper: {PAPER_ENDS}. Ends are those of one "
        "traced run; *alone* and *latency* are medians of others, at other moments and clocks.",
        _ends(report["pipelined"], report["alone"]),
        "## What tracing costs\n\nLatency of the pipeline, CUDA graphs, interleaved, us.",
        _tracing(report["tracing"]),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    if not rows:
        return ""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def _us(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.{2 if abs(value) < 10 else 1 if abs(value) < 1000 else 0}f}"


def _quantities(found: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        [
            q["kernel"], f"{q['name']}: {QUANTITIES[q['name']]}", _us(PAPER_US.get(q["kernel"], {}).get(q["name"])),
            f"{_us(q['median'])} ({_us(q['p05'])} to {_us(q['p95'])})", f"{q['tiles']} of {q['of']}",
            "-" if q["hidden"] is None else f"{100 * q['hidden']:.1f} %",
        ]
        for q in found
        if q["run"] == "pipelined" and q["order"] == OWN_ORDER and q["destination"] == "peer"
    ]  # fmt: skip
    return _table(["kernel", "quantity", "paper", "measured", "tiles", "hidden"], rows)


def _by_order(found: Sequence[Mapping[str, Any]]) -> str:
    """A row per kernel, run, destination and order; a column per quantity."""
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for q in found:
        key = (q["kernel"], q["run"], q["destination"], ORDERS[q["order"]])
        rows.setdefault(key, {})[q["name"]] = _us(q["median"])
    return _table(
        ["kernel", "run", "destination", "order", *QUANTITIES],
        [[*key, *(cells.get(name, "-") for name in QUANTITIES)] for key, cells in rows.items()],
    )


def _alone(found: Sequence[Mapping[str, Any]]) -> str:
    """A row per kernel and order; columns: destination, with and without."""
    columns = [("local", False), ("local", True), ("peer", False), ("peer", True)]
    times = {(a["kernel"], a["order"], a["destination"], a["protocol"]): a["us"]["median"] for a in found}
    rows = []
    for kernel, order in dict.fromkeys((a["kernel"], a["order"]) for a in found):
        base = times.get((kernel, order, "local", False))
        cells = [times.get((kernel, order, *column)) for column in columns]
        rows.append([kernel, ORDERS[order], *(_relative(us, base) for us in cells)])
    head = [f"{place}, {'protocol' if protocol else 'none'}" for place, protocol in columns]
    return _table(["kernel", "order", *head], rows)


def _relative(us: float | None, base: float | None) -> str:
    if us is None:
        return "-"
    return _us(us) if not base or us == base else f"{_us(us)} ({100 * (us / base - 1):+.1f} %)"


def _resources(found: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        [r["kernel"], PROTOCOLS[r["protocol"]], r["registers"], r["shared_bytes"], r["spilled_bytes"]] for r in found
    ]
    return _table(["kernel", "variant", "registers a thread", "shared memory, bytes", "spilled, bytes"], rows)


def _ends(runs: Sequence[Mapping[str, Any]], alone: Sequence[Mapping[str, Any]]) -> str:
    plain = [a for a in alone if a["destination"] == "local" and not a["protocol"]]
    base = {(a["kernel"], a["order"]): a["us"]["median"] for a in plain}
    columns = ("producer_end_us", "consumer_begin_us", "consumer_end_us", "latency_us")
    rows = []
    for run in runs:
        times = [base.get((run["kernel"], run["order"])), *(run[column] for column in columns)]
        rows.append([run["kernel"], ORDERS[run["order"]], *(_us(time) for time in times)])
    head = ["alone, no protocol", "producer ends", "consumer begins", "consumer ends", "latency, not traced"]
    return _table(["kernel", "order", *head], rows)


def _tracing(found: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        [t["kernel"], _us(t["off_us"]), _us(t["on_us"]), f"{100 * (t['on_us'] / t['off_us'] - 1):+.2f} %"]
        for t in found
    ]
    return _table(["kernel", "off", "on", "cost"], rows)
