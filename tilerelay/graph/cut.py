"""Cut a placed workload into parts: every part of every stage becomes a stage of its own, on one device.

After this nothing else needs to know that a stage was cut: a part is a stage with fewer columns, with an edge to every
part that reads its rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tilerelay.errors import InvalidInput, PlacementError
from tilerelay.graph.dependency import gemm_dependencies
from tilerelay.graph.placement import Part, Placement
from tilerelay.graph.tiling import TileGrid
from tilerelay.graph.workload import Edge, Workload


@dataclass(frozen=True, eq=False)
class CutWorkload:
    """A workload of parts and their placement, one device each.

    Attributes:
        whole: the workload as it was.
        workload: stages in the order of the original ones, the parts of a stage side by side.
        placement: one part for every stage of `workload`.
        origin: for each stage of `workload`, (stage, part) in the original placement.
        columns: for each stage of `workload`, (first, end) columns of the original output.
        programs: stages of `workload` that one kernel walks over, in order: the parts of cut stages that follow each
            other on a device; every other stage alone.
    """

    whole: Workload
    workload: Workload
    placement: Placement
    origin: tuple[tuple[int, int], ...]
    columns: tuple[tuple[int, int], ...]
    programs: tuple[tuple[int, ...], ...]

    def parts_of(self, stage: int) -> list[int]:
        """Stages of `workload` that make up an original stage."""
        return [i for i, (original, _) in enumerate(self.origin) if original == stage]


def cut(workload: Workload, placement: Placement) -> CutWorkload:
    """Cut a chain by the columns of its placement; a placement that cuts nothing gives the same stages.

    Raises:
        PlacementError: another number of stages, or columns that are not all of a stage's or do not start at a
            multiple of eight.
        InvalidInput: a cut stage in a workload that is not a chain of GEMMs, or one with an order of its own.
    """
    if len(placement.stages) != len(workload.stages):
        raise PlacementError(
            f"{len(placement.stages)} stages are placed, the workload has {len(workload.stages)}: place every stage"
        )
    cuts = [_columns(workload.stages[s].grid, s, parts) for s, parts in enumerate(placement.stages)]
    origin = tuple((s, p) for s, parts in enumerate(placement.stages) for p in range(len(parts)))
    columns = tuple(cuts[s][p] for s, p in origin)
    parts_of = [[i for i, (s, _) in enumerate(origin) if s == stage] for stage in range(len(workload.stages))]
    stages = []
    for (s, _), (first, end) in zip(origin, columns, strict=True):
        stage = workload.stages[s]
        if len(parts_of[s]) == 1:
            stages.append(stage)
        else:
            if stage.order is not None:
                raise InvalidInput(f"stage {stage.name} is cut, so its tiles have no common order; leave order=None")
            grid = replace(stage.grid, n=end - first)
            stages.append(replace(stage, name=f"{stage.name}[{first}:{end}]", grid=grid))
    edges = []
    for edge in workload.edges:
        producers, consumers = parts_of[edge.producer], parts_of[edge.consumer]
        if len(producers) == len(consumers) == 1:
            edges.append(Edge(producers[0], consumers[0], edge.dependencies))
            continue
        if not workload.is_chain:
            raise InvalidInput("only the stages of a chain can be cut by columns")
        producer, consumer = workload.stages[edge.producer].grid, workload.stages[edge.consumer].grid
        # Where a panel is one tile, grouped and per tile are the same.
        grouped = edge.dependencies.num_groups <= consumer.rows
        if not edge.dependencies.same_as(gemm_dependencies(producer, consumer, grouped=grouped)):
            raise InvalidInput(
                f"edge {edge.producer} -> {edge.consumer} has dependencies of its own; only a GEMM's, which reads "
                f"whole row panels, can be cut by columns"
            )
        edges += [
            Edge(p, c, gemm_dependencies(stages[p].grid, stages[c].grid, grouped=grouped))
            for c in consumers
            for p in producers
        ]
    placed = Placement(tuple((placement.stages[s][p],) for s, p in origin))
    in_parts = replace(workload, stages=tuple(stages), edges=tuple(edges))
    return CutWorkload(workload, in_parts, placed, origin, columns, _programs(placed))


def _columns(grid: TileGrid, stage: int, parts: tuple[Part, ...]) -> list[tuple[int, int]]:
    """Column ranges of a stage's parts, checked."""
    if len(parts) == 1 and parts[0].columns is None:
        return [(0, grid.n)]
    ranges = [part.columns for part in parts if part.columns is not None]  # the placement has checked that they join
    for first, _ in ranges:
        if first % 8:
            raise PlacementError(
                f"stage {stage}: a part begins at column {first}; cut at multiples of 8 (16 bytes), as `sharded` does"
            )
    if (ranges[0][0], ranges[-1][1]) != (0, grid.n):
        raise PlacementError(
            f"stage {stage}: the columns {ranges} are not all of the stage's, 0 to {grid.n}; place every column"
        )
    return ranges


def _programs(placement: Placement) -> tuple[tuple[int, ...], ...]:
    programs: list[list[int]] = []
    cut_program: dict[int, list[int]] = {}
    for stage, (part,) in enumerate(placement.stages):
        if part.columns is None or part.sms is not None:
            programs.append([stage])
        elif part.device in cut_program:
            cut_program[part.device].append(stage)
        else:
            cut_program[part.device] = [stage]
            programs.append(cut_program[part.device])
    return tuple(tuple(program) for program in programs)
