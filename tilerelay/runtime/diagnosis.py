"""Who waited for what: from the error records and the protocol memory of an aborted run."""

from __future__ import annotations

from collections.abc import Sequence

from tilerelay.kernels.protocol import EARLIER_TILE, FIRST_PIECE
from tilerelay.protocol.layout import RECORD_FIELDS, wrap32
from tilerelay.runtime.workspace import Workspace

NAMED_TILES = 8


def describe(workspace: Workspace, stage_of: Sequence[int]) -> list[str]:
    """One line for every stage, or part of one, that gave up. Nothing may be running.

    Args:
        stage_of: the original stage of each of the layout's stages, which may be parts.
    """
    lines = []
    for stage, words in enumerate(workspace.records.tolist()):
        record = dict(zip(RECORD_FIELDS, words, strict=False))
        if record["raised"]:
            lines.append(f"stage {stage_of[stage]} {_describe(workspace, stage, record)}")
    return lines


def _describe(workspace: Workspace, stage: int, record: dict[str, int]) -> str:
    layout = workspace.layout
    name = layout.workload.stages[stage].name
    device = layout.placement.device_of(stage)
    waits_for = (
        f"tile {record['tile']}" if record["tile"] >= 0 else f"the next tile of its queue (ticket {record['ticket']})"
    )
    if record["counter"] == FIRST_PIECE.value:
        return (
            f"({name}) on device {device} waited for {waits_for} in run {record['epoch']}; "
            f"the first piece of its sum had not been handed over"
        )
    if record["counter"] == EARLIER_TILE.value:
        before = record["ticket"] - (layout.workload.stages[stage].under_way or 0)
        return (
            f"({name}) on device {device} waited to send {waits_for} in run {record['epoch']}; "
            f"tile {int(workspace.stage(stage, 'order')[before])} had not been sent before"
        )
    missing = missing_producers(workspace, stage, record["counter"], record["epoch"])
    lacking = {producer: tiles for producer, tiles in missing.items() if tiles} or missing
    return f"({name}) on device {device} waited for {waits_for} in run {record['epoch']}; " + "; ".join(
        _named(layout.workload.stages[producer].name, tiles) for producer, tiles in lacking.items()
    )


def _named(producer: str, tiles: list[int]) -> str:
    named = ", ".join(str(tile) for tile in tiles[:NAMED_TILES]) + (", ..." if len(tiles) > NAMED_TILES else "")
    return f"{len(tiles)} of {producer}'s tiles had not been published: {named or 'none (an entry was lost)'}"


def missing_producers(workspace: Workspace, stage: int, counter: int, epoch: int) -> dict[int, list[int]]:
    """By producer of a stage, its tiles that were not published in the run though a counter counts them.

    Args:
        counter: of the stage's groups and steps; negative: any.
    """
    missing = {}
    for index in workspace.layout.in_edges(stage):
        edge = workspace.layout.workload.edges[index]
        published = workspace.stage(edge.producer, "published").cpu().numpy()
        wanted = edge.dependencies.counted_by(counter) if counter >= 0 else range(edge.dependencies.num_producers)
        missing[edge.producer] = [p for p in wanted if published[p] != wrap32(epoch)]
    return missing
