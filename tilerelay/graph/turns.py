"""Turns and steps: how the first tiles of a stage get to readers on other devices that already wait for them.

All SMs end a wave together. Sent at once, its tiles share the way and come together, too, and whoever needs the first
columns waits for all of them. So where a stage has few waves its tiles are sent in turn, a few at a time, in the order
of computation; and what reads them begins its sums with the columns that have come. Sums have the same bits as ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilerelay.graph.cut import CutWorkload
from tilerelay.graph.dependency import gemm_dependencies
from tilerelay.graph.workload import Workload

# Measured on two H200 GPUs: eight cannot fill NVLink, thirty-two are late by a microsecond or two.
UNDER_WAY = 16
# Of a stage whose readers run at the same time; with more, nothing is gained.
MOST_WAVES = 8
FIRST_STEP = 256  # columns; each step of a sum takes it to twice what came before


def steps_of(k: int) -> tuple[int, ...]:
    """Where each step of a sum over k ends; empty: one step."""
    ends = [FIRST_STEP << i for i in range((k - 1).bit_length()) if FIRST_STEP << i < k]
    return (*ends, k) if ends else ()


def with_turns(cut: CutWorkload, tiles_in_flight: Sequence[int], can: Sequence[bool]) -> Workload:
    """The workload in parts, with turns where they pay, and steps for what reads those stages.

    A stage takes turns if it has few waves (one, where a reader on its own device comes after it), no walk, a reader on
    another device, and if all its readers can take steps.

    Args:
        tiles_in_flight: for each part, how many tiles its device computes at once.
        can: for each part, whether its kernel knows turns and steps.
    """
    workload, device_of = cut.workload, cut.placement.device_of
    stages = list(workload.stages)

    def takes_steps(consumer: int) -> bool:
        """Its sum is long enough, and its operand a GEMM's: whole row panels, a counter for each."""
        return (
            can[consumer]
            and bool(steps_of(stages[consumer].k))
            and all(
                edge.dependencies.same_as(gemm_dependencies(stages[edge.producer].grid, stages[consumer].grid))
                for edge in workload.edges
                if edge.consumer == consumer
            )
        )

    for producer, stage in enumerate(workload.stages):
        readers = [edge.consumer for edge in workload.edges if edge.producer == producer]
        after = {part for program in cut.programs if producer in program for part in program}
        waves = 1 if after & set(readers) else MOST_WAVES
        is_sent = any(device_of(reader) != device_of(producer) for reader in readers)
        is_short = stage.walk is None and stage.grid.tiles <= waves * tiles_in_flight[producer]
        if can[producer] and is_sent and is_short and all(map(takes_steps, readers)):
            stages[producer] = replace(stage, under_way=UNDER_WAY)

    stepped = {edge.consumer for edge in workload.edges if stages[edge.producer].under_way}
    edges = [
        replace(
            edge,
            dependencies=gemm_dependencies(
                stages[edge.producer].grid,
                stages[edge.consumer].grid,
                steps=steps_of(stages[edge.consumer].k),
                first_column=cut.columns[edge.producer][0],
            ),
        )
        if edge.consumer in stepped
        else edge
        for edge in workload.edges
    ]
    return replace(workload, stages=tuple(stages), edges=tuple(edges))
