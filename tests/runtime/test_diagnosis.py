"""What an aborted run says: every part that a tile waited for, and nothing that had come."""

from __future__ import annotations

import torch

from tilerelay.graph.catalog import dense_chain
from tilerelay.graph.cut import CutWorkload, cut
from tilerelay.graph.placement import Placement, pipelined, sharded
from tilerelay.graph.turns import with_turns
from tilerelay.graph.workload import Workload
from tilerelay.kernels.protocol import EARLIER_TILE
from tilerelay.protocol.layout import RECORD_FIELDS, ProtocolLayout
from tilerelay.runtime.diagnosis import describe, missing_producers
from tilerelay.runtime.workspace import Workspace, new_records

WIDTHS = [64, 320, 136]
CHAIN = dense_chain(200, WIDTHS, tile=(64, 64))


def aborted(placement: Placement, signalling: str, epoch: int) -> tuple[CutWorkload, Workspace]:
    """Protocol memory in the middle of a run in which nothing was published yet."""
    placed = cut(CHAIN, placement)
    return placed, workspace_of(placed.workload, placed.placement, signalling, epoch)


def workspace_of(workload: Workload, placement: Placement, signalling: str, epoch: int) -> Workspace:
    layout = ProtocolLayout(workload, placement, signalling)
    buffers = {device: torch.empty(layout.size(device), dtype=torch.uint8) for device in layout.devices}
    workspace = Workspace(layout, buffers, new_records(len(workload.stages), "cpu"), lambda words, _: words)
    workspace.reset(epoch)
    return workspace


def give_up(workspace: Workspace, stage: int, **words: int) -> None:
    record = {"raised": 1, "stage": stage, "have": 0, "want": 1, **words}
    workspace.records[stage, : len(RECORD_FIELDS)] = torch.tensor([record[name] for name in RECORD_FIELDS])


def lines(placed: CutWorkload, workspace: Workspace) -> list[str]:
    return describe(workspace, [stage for stage, _ in placed.origin])


def test_tiles_of_all_parts_that_are_missing_are_named() -> None:
    """Each of the three parts has two tiles in a panel, so panel 1 is tiles 2 and 3 of each."""
    placed, workspace = aborted(sharded(WIDTHS[1:], [0, 1, 2]), "counter", 2**31)
    now = -(2**31)
    give_up(workspace, 4, ticket=2, tile=1, counter=1, epoch=now)
    assert not workspace.stage(0, "published").eq(now).any()
    names = [stage.name for stage in placed.workload.stages]
    assert missing_producers(workspace, 4, 1, now) == {0: [2, 3], 1: [2, 3], 2: [2, 3]}
    assert lines(placed, workspace) == [
        f"stage 1 ({names[4]}) on device 1 waited for tile 1 in run {now}; "
        f"2 of {names[0]}'s tiles had not been published: 2, 3; "
        f"2 of {names[1]}'s tiles had not been published: 2, 3; "
        f"2 of {names[2]}'s tiles had not been published: 2, 3"
    ]
    workspace.stage(0, "published").fill_(now)
    workspace.stage(2, "published")[2] = now
    assert lines(placed, workspace)[0].endswith(
        f"in run {now}; 2 of {names[1]}'s tiles had not been published: 2, 3; "
        f"1 of {names[2]}'s tiles had not been published: 3"
    )


def test_a_lost_signal_and_a_long_list_are_told_from_missing_tiles() -> None:
    placed, workspace = aborted(pipelined([0, 1]), "queue", 3)
    give_up(workspace, 1, ticket=5, tile=-1, counter=-1, epoch=3)
    assert lines(placed, workspace) == [
        "stage 1 (layer1) on device 1 waited for the next tile of its queue (ticket 5) in run 3; "
        "20 of layer0's tiles had not been published: 0, 1, 2, 3, 4, 5, 6, 7, ..."
    ]
    workspace.stage(0, "published").fill_(3)
    assert lines(placed, workspace)[0].endswith("0 of layer0's tiles had not been published: none (an entry was lost)")


def test_a_step_names_the_tiles_that_it_reads() -> None:
    """The second of three steps reads columns 256 to 511: the second tile of part 0, the first of part 1."""
    placed = cut(dense_chain(200, [64, 640, 136], tile=(64, 128)), sharded([640, 136], [0, 1]))
    workload = with_turns(placed, [132] * 4, [True] * 4)
    workspace = workspace_of(workload, placed.placement, "counter", 1)
    give_up(workspace, 2, ticket=0, tile=0, counter=1, epoch=1)
    first, second = (stage.name for stage in workload.stages[:2])
    assert describe(workspace, [0, 0, 1, 1])[0].endswith(
        f"waited for tile 0 in run 1; 1 of {first}'s tiles had not been published: 2; "
        f"2 of {second}'s tiles had not been published: 0, 1"
    )


def test_a_turn_that_does_not_come_is_no_missing_tile() -> None:
    placed = cut(dense_chain(200, [64, 640, 136], tile=(64, 128)), sharded([640, 136], [0, 1]))
    workload = with_turns(placed, [132] * 4, [True] * 4)
    workspace = workspace_of(workload, placed.placement, "counter", 1)
    give_up(workspace, 1, ticket=17, tile=5, counter=EARLIER_TILE.value, epoch=1)
    assert describe(workspace, [0, 0, 1, 1]) == [
        f"stage 0 ({workload.stages[1].name}) on device 1 waited to send tile 5 in run 1; "
        f"tile {int(workspace.stage(1, 'order')[1])} had not been sent before"
    ]


def test_nobody_gave_up() -> None:
    assert lines(*aborted(sharded(WIDTHS[1:], [0, 1]), "counter", 1)) == []
