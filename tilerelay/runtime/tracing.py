"""The event table of a pipeline's last run: from its time stamps, and from protocol memory who computed which tile."""

from __future__ import annotations

import heapq
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from tilerelay.errors import InvalidInput, TilerelayError
from tilerelay.graph.placement import Placement
from tilerelay.graph.tiling import Int32s
from tilerelay.graph.workload import Workload
from tilerelay.kernels.protocol import EVENTS
from tilerelay.protocol.layout import wrap32
from tilerelay.runtime.checks import tensors_of
from tilerelay.runtime.clocks import Alignment, Clocks
from tilerelay.runtime.cuda_pipeline import CudaPipeline
from tilerelay.runtime.launch import grid_of
from tilerelay.runtime.workspace import Workspace
from tilerelay.trace.events import (
    KEYS,
    MISSING,
    OBTAINED,
    PUBLISHED,
    SEEN,
    ClockInfo,
    Int64s,
    Trace,
    edge_info,
    first_workers,
    stage_info,
)

if TYPE_CHECKING:
    from tilerelay.runtime.pipeline import Pipeline

STAMP_BYTES = 8


@dataclass(frozen=True)
class StageRun:
    """What is known of a stage after a run.

    Attributes:
        stamps: int64 [tiles, EVENTS], ns of the device's clock; 0: no such event.
        tickets: [tiles] the tile of each ticket.
        workers: CTAs at a time; None for a classical grid, whose CTAs follow each other wherever there is room.
        first_ticket: tickets that the same CTAs took in stages before this one.
        program: stages with the same number follow each other on the same SMs; None: these are the stage's own.
    """

    device: int
    kernel: str
    stamps: Int64s
    tickets: Int32s
    workers: int | None
    first_ticket: int = 0
    program: int | None = None


def trace_run(
    pipe: Pipeline, x: torch.Tensor | Sequence[torch.Tensor], *, warm_up: int = 3, graph: bool = True
) -> Trace:
    """Run the pipeline (made with `trace=True`) and return the trace of its last run.

    Args:
        x: [M, K] on the first stage's device; of a first stage that is cut, on each of its devices: a trace has no
            events for copies, and would show one as a late start.
        warm_up: runs before, so that clocks of SMs and caches are those of a run among others (GPUs only).
        graph: replay a CUDA graph; else launch eagerly (GPUs only).

    Raises:
        InvalidInput: as `trace_of`, or x is not on all devices. UnsupportedMachine: the clocks cannot be compared.
        PipelineAborted: see `Pipeline`.
    """
    given, homes = len(tensors_of(x)), len(pipe.placement.stages[0])
    if given < homes:
        raise InvalidInput(f"x is given on {given} of the first stage's {homes} devices; give it on each")
    if pipe.backend == "cpu":
        pipe(x)
        return trace_of(pipe)
    clocks = Clocks(pipe.placement.devices)
    go: Callable[[], object] = pipe.capture(x).replay if graph else lambda: pipe(x)
    for _ in range(warm_up):
        go()
    pipe.synchronize()
    before = clocks.read()
    go()
    pipe.synchronize()
    return trace_of(pipe, Alignment(clocks.reference, before, clocks.read()))


def trace_of(pipe: Pipeline, alignment: Alignment | None = None) -> Trace:
    """The trace of the pipeline's last run, which must be complete.

    Args:
        alignment: of the devices' clocks; None: one clock (virtual devices).

    Raises:
        InvalidInput: made without `trace=True`, not run yet, or several GPUs without an alignment.
    """
    if pipe.backend == "cuda" and alignment is None and len(pipe.placement.devices) > 1:
        raise InvalidInput("several GPUs have several clocks; use trace_run, which compares them")
    stamps = pipe.stamps
    workspace = pipe._run.workspace
    workload, placement = pipe._cut.workload, pipe._cut.placement  # parts: every stage is on one device
    programs = _programs(pipe)
    kernels = pipe._run._kernels if isinstance(pipe._run, CudaPipeline) else [(part,) for part in programs]
    runs = {}
    for parts in kernels:
        stages = [workload.stages[part] for part in parts]
        taken = [workspace.layout.tickets(part) for part in parts]
        for i, part in enumerate(parts):
            device, kernel = placement.device_of(part), pipe.kernels[pipe._cut.origin[part][0]]
            workers: int | None = 1  # a virtual device's process runs one CTA after another
            if isinstance(pipe._run, CudaPipeline):
                sms = placement.stages[part][0].sms or pipe._run._sms_of[device]
                workers = grid_of(kernel, stages, sms) if kernel == "persistent" else None
            runs[part] = StageRun(
                device, kernel, stamps[part].numpy().astype(np.int64), tickets(workspace, part), workers,
                sum(taken[:i]), programs[part],
            )  # fmt: skip
    source = "globaltimer" if pipe.backend == "cuda" else "monotonic"
    return assemble(workload, dict(sorted(runs.items())), source, alignment, pipe.describe())


def _programs(pipe: Pipeline) -> dict[int, int]:
    """Part -> program: parts of one are computed one after the other, on the same SMs or by the same process."""
    if isinstance(pipe._run, CudaPipeline):
        return {part: number for number, parts in enumerate(pipe._cut.programs) for part in parts}
    return {part: pipe._cut.placement.device_of(part) for part in range(len(pipe._cut.origin))}


def tickets(workspace: Workspace, stage: int) -> Int32s:
    """The tile that each ticket of the last run had: the stage's order, or what the queue's ring says.

    Of a tile whose sum two CTAs share, the ticket that ends it counts; the other one is -1.

    Raises:
        TilerelayError: the ring does not hold the last run's entries.
    """
    layout = workspace.layout
    edge = next((i for i, e in enumerate(layout.workload.edges) if e.consumer == stage), None)
    if edge is None or layout.signalling != "queue":
        order, walk = workspace.stage(stage, "order").cpu().numpy(), layout.workload.stages[stage].walk
        return np.where(walk.ends(layout.workload.stages[stage].k), order, -1) if walk else np.asarray(order)
    numbers = layout.edge_numbers(edge)
    epoch = int(wrap32(int(workspace.stage(stage, "epoch")) - 1))  # the last CTA has moved on to the next one
    ring = workspace.edge(edge, "ring").cpu().numpy()
    ticket = np.arange(layout.workload.stages[stage].grid.tiles)
    entries = ring[((epoch - 1) * numbers.entries + ticket // numbers.group_size) & numbers.ring_mask]
    if (entries >> 32 != epoch).any():
        raise TilerelayError(f"stage {stage}: its queue does not hold the entries of run {epoch}; run it to the end")
    return np.asarray(wrap32(entries & 0xFFFFFFFF) * numbers.group_size + ticket % numbers.group_size, dtype=np.int32)


def assemble(
    workload: Workload,
    runs: Mapping[int, StageRun],
    source: str,
    alignment: Alignment | None,
    facts: Mapping[str, Any],
) -> Trace:
    """One table from the stages' stamps, on one clock, from its first event on.

    Args:
        runs: by stage; stages that did not run may be missing.
        facts: about the run, for `Trace.run`.

    Raises:
        InvalidInput: tiles that were not run.
    """
    if not all(run.stamps[:, OBTAINED].all() for run in runs.values()):
        raise InvalidInput("not every tile has been obtained; run the pipeline to its end first")
    keys, times, workers = [], [], {}
    for stage, run in runs.items():
        tiles = len(run.stamps)
        who, workers[stage] = _workers(run)
        keys.append(np.stack([np.full(tiles, stage), np.arange(tiles), np.full(tiles, run.device), who], axis=1))
        taken = alignment.offset(run.device, run.stamps) if alignment else np.zeros(run.stamps.shape)
        # The offset is small, the stamp is not: taking it off in integers keeps all digits.
        times.append(np.where(run.stamps == 0, 0, run.stamps - np.rint(taken).astype(np.int64)))
    programs = {stage: -1 - stage if run.program is None else run.program for stage, run in runs.items()}
    sizes: dict[tuple[int, int], int] = {}
    for stage, run in runs.items():
        place = run.device, programs[stage]
        sizes[place] = max(sizes.get(place, 0), workers[stage])
    base = dict(zip(sizes, first_workers([device for device, _ in sizes], list(sizes.values())), strict=True))
    for rows, (stage, run) in zip(keys, runs.items(), strict=True):
        rows[:, -1] += base[run.device, programs[stage]]
    stamps = np.concatenate(times)
    begin = stamps[stamps != 0].min()
    granularity = min((_granularity(run.stamps) for run in runs.values()), default=1)
    middle = {run.device: np.median(run.stamps[run.stamps > 0], keepdims=True) for run in runs.values()}
    offsets = {d: float(alignment.offset(d, stamp)[0]) for d, stamp in middle.items()} if alignment else {}
    clock = ClockInfo(source, "ns", granularity, alignment.error() if alignment else 0.0, offsets)
    infos = tuple(
        stage_info(
            s, runs[i].kernel if i in runs else "none", workers.get(i, 0),
            workers_known=i not in runs or runs[i].workers is not None,
        )
        for i, s in enumerate(workload.stages)
    )  # fmt: skip
    return Trace(
        infos,
        tuple(edge_info(edge) for edge in workload.edges),
        clock,
        dict(facts),
        np.concatenate(keys).astype(np.int64).reshape(-1, len(KEYS)),
        np.where(stamps == 0, MISSING, stamps - begin),
    )


def _granularity(stamps: Int64s) -> int:
    """The step of the clock: all differences between its stamps are multiples of it."""
    return int(np.gcd.reduce(np.diff(stamps[stamps > 0]))) or 1


def _workers(run: StageRun) -> tuple[NDArray[np.int64], int]:
    """([tiles] worker of each tile, number of workers).

    A persistent CTA takes every so many-th ticket, over all the stages that it walks through. A classical grid's CTAs
    are dispatched in the order of their numbers, each to the place that became free first; there are as many places as
    tiles were once under way together.
    """
    tiles = len(run.stamps)
    who = np.empty(tiles, dtype=np.int64)
    if run.workers is not None:
        taken = np.flatnonzero(run.tickets >= 0)
        who[run.tickets[taken]] = (run.first_ticket + taken) % run.workers
        return who, run.workers
    begin, end = run.stamps[:, SEEN], run.stamps[:, PUBLISHED]
    order = np.argsort(np.concatenate([end, begin]), kind="stable")  # at the same time, who ends makes room
    places = int(np.cumsum(np.where(order < tiles, -1, 1)).max())
    free = [(0, place) for place in range(places)]
    for tile in run.tickets.tolist():
        _, place = heapq.heappop(free)
        who[tile] = place
        heapq.heappush(free, (int(end[tile]), place))
    return who, places


def buffer_bytes(workload: Workload, placement: Placement) -> dict[int, int]:
    """Bytes of time stamps on each device, every stage being on one."""
    sizes = dict.fromkeys(placement.devices, 0)
    for i, stage in enumerate(workload.stages):
        sizes[placement.device_of(i)] += stage.grid.tiles * EVENTS.value * STAMP_BYTES
    return sizes


def check_room(workload: Workload, placement: Placement, free: Callable[[int], int]) -> None:
    """Refuse a trace whose time stamps do not fit.

    Args:
        workload, placement: with every stage on one device (see `graph.cut`).
        free: device -> bytes that it has left.

    Raises:
        InvalidInput: says what is needed, what there is, and for how many rows that would do.
    """
    for device, need in buffer_bytes(workload, placement).items():
        room = free(device)
        if need > room:
            grid = workload.stages[0].grid
            rows = room * grid.rows // need * grid.block_m
            advice = f"trace {rows} rows (m={rows})" if rows else "trace fewer rows (a smaller m)"
            raise InvalidInput(
                f"the time stamps of all tiles need {need:,} bytes on device {device}, {room:,} are free; "
                f"{advice} or use larger tiles"
            )


def free_bytes(backend: str) -> Callable[[int], int]:
    """How many bytes a device has left, by its index; for virtual devices: the machine's memory."""
    if backend == "cuda":
        return lambda device: int(torch.cuda.mem_get_info(device)[0])
    return lambda _: os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
