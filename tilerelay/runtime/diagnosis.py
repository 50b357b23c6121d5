"""Who waited for what: from the error records and the protocol memory of an aborted run."""

from __future__ import annotations

from tilerelay.protocol.layout import RECORD_FIELDS, ProtocolLayout, wrap32
from tilerelay.runtime.workspace import Workspace

NAMED_TILES = 8


def describe(workspace: Workspace, epoch: int) -> list[str]:
    """One line for every stage that gave up. Nothing may be running.

    Args:
        epoch: unused runs of the pipeline count from here when a record carries none.
    """
    lines = []
    for stage, words in enumerate(workspace.records.tolist()):
        record = dict(zip(RECORD_FIELDS, words, strict=False))
        if record["raised"]:
            lines.append(_describe_stage(workspace, stage, record))
    return lines


def _describe_stage(workspace: Workspace, stage: int, record: dict[str, int]) -> str:
    layout = workspace.layout
    name = layout.workload.stages[stage].name
    device = layout.placement.device_of(stage)
    waits_for = (
        f"tile {record['tile']}" if record["tile"] >= 0 else f"the next tile of its queue (ticket {record['ticket']})"
    )
    missing = missing_producers(workspace, stage, record["group"], record["epoch"])
    named = ", ".join(str(t) for t in missing[:NAMED_TILES]) + (", ..." if len(missing) > NAMED_TILES else "")
    producer = layout.workload.stages[_in_edge(layout, stage).producer].name
    return (
        f"stage {stage} ({name}) on device {device} waited for {waits_for} in run {record['epoch']}; "
        f"{len(missing)} of {producer}'s tiles had not been published: {named or 'none (an entry was lost)'}"
    )


def missing_producers(workspace: Workspace, stage: int, group: int, epoch: int) -> list[int]:
    """Producer tiles that a group (group < 0: any group) of a stage needs and that were not published in the run."""
    edge = _in_edge(workspace.layout, stage)
    published = workspace.stage(edge.producer, "published").cpu().numpy()
    wanted = edge.dependencies.prerequisites_of(group) if group >= 0 else range(edge.dependencies.num_producers)
    return [p for p in wanted if published[p] != wrap32(epoch)]


def _in_edge(layout: ProtocolLayout, stage: int):  # type: ignore[no-untyped-def]
    return next(e for e in layout.workload.edges if e.consumer == stage)
