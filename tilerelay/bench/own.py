"""The library's own methods as the harness sees them: pipelined with both signallings, sharded with two tile shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from tilerelay.baselines.cell import Cell
from tilerelay.baselines.lanes import Lanes
from tilerelay.baselines.method import Lives, Piece, Variant, layers_fill_gpus, refuse_unless, several_gpus
from tilerelay.baselines.operands import Operands
from tilerelay.graph.catalog import dense_chain
from tilerelay.graph.placement import pipelined, sharded
from tilerelay.runtime.pipeline import Pipeline

SIGNALLING = ("queue", "counter")
TILES = ((128, 256), (128, 128))


class Pipelined:
    """A layer per GPU, all at once, tile by tile."""

    name = "pipelined"
    lives = Lives(x="GPU 0", y="the last GPU")

    def __init__(self, make_pipeline: Callable[..., Any] = Pipeline) -> None:
        self._make_pipeline = make_pipeline

    def refusal(self, cell: Cell) -> str | None:
        fits, text = layers_fill_gpus(cell)
        return text if not fits else None if cell.layers == cell.gpus else "puts one layer on each GPU"

    def variants(self, cell: Cell, operands: Operands, lanes: Lanes) -> list[Variant]:
        # One GPU has nobody to signal to.
        kinds = SIGNALLING if cell.gpus > 1 else SIGNALLING[:1]
        return [
            Variant(
                label=kind,
                enqueue=lambda: None,
                pieces=lambda: (),
                launcher=partial(self._launch, cell, operands, kind),
            )
            for kind in kinds
        ]

    def _launch(self, cell: Cell, operands: Operands, signalling: str, timing: str) -> PipelineLaunch:
        pipeline = self._make_pipeline(
            dense_chain(cell.m, cell.widths),
            weights=[operands.weight(layer, layer) for layer in range(cell.layers)],
            placement=pipelined(range(cell.gpus)),
            signalling=signalling,
            kernel="persistent",
        )
        try:
            return PipelineLaunch(pipeline, operands.x(0)[: cell.m], timing)
        except BaseException:
            pipeline.close()
            raise


class Sharded:
    """Every layer cut by columns over all GPUs, one kernel per GPU, tiles exchanged as they are made."""

    name = "sharded"
    lives = Lives(x="every GPU", y="cut by columns", replicated="X and the layers' outputs between")
    replicate = False

    def __init__(self, make_pipeline: Callable[..., Any] = Pipeline) -> None:
        self._make_pipeline = make_pipeline

    def refusal(self, cell: Cell) -> str | None:
        return refuse_unless(several_gpus(cell))

    def variants(self, cell: Cell, operands: Operands, lanes: Lanes) -> list[Variant]:
        return [
            Variant(
                label=f"tiles of {tile[0]} x {tile[1]}",
                enqueue=lambda: None,
                pieces=lambda: (),
                launcher=partial(self._launch, cell, operands, tile),
            )
            for tile in TILES
        ]

    def _launch(self, cell: Cell, operands: Operands, tile: tuple[int, int], timing: str) -> PipelineLaunch:
        gpus = range(cell.gpus)
        placement = sharded(cell.widths[1:], gpus)
        weights = [
            [operands.weight(layer, part.device)[slice(*part.columns)] for part in parts if part.columns]
            for layer, parts in enumerate(placement.stages)
        ]
        pipeline = self._make_pipeline(
            dense_chain(cell.m, cell.widths, tile=tile),
            weights=weights,
            placement=placement,
            replicate=self.replicate,
            kernel="persistent",
        )
        try:
            return PipelineLaunch(pipeline, [operands.x(gpu)[: cell.m] for gpu in gpus], timing)
        except BaseException:
            pipeline.close()
            raise


class ShardedReplicated(Sharded):
    """As sharded, but every GPU gets all of Y."""

    name = "sharded-replicated"
    lives = Lives(x="every GPU", y="every GPU", replicated="X, Y and the layers' outputs between")
    replicate = True


class PipelineLaunch:
    """A pipeline and its CUDA graph; closes the pipeline with itself."""

    def __init__(self, pipeline: Any, x: torch.Tensor | Sequence[torch.Tensor], timing: str) -> None:
        self._pipeline = pipeline
        # As the baselines' graphs, it follows what is on the launching stream.
        self._run: Callable[[], object] = (
            pipeline.capture(x, all_streams=False).replay if timing == "graph" else lambda: pipeline(x)
        )

    def replay(self) -> None:
        self._run()

    def finish(self) -> None:
        """Raises PipelineAborted when a wait ran past its deadline."""
        self._pipeline.synchronize()

    def pieces(self) -> list[Piece]:
        outputs, parts = self._pipeline.outputs, self._pipeline.placement.stages[-1]
        cut = len(outputs) > 1 and not self._pipeline.replicate
        return [
            Piece(tensor, first_column=part.columns[0] if cut else 0)
            for tensor, part in zip(outputs, parts, strict=True)
        ]

    def poison(self) -> list[torch.Tensor]:
        return [*self._pipeline.intermediates, *self._pipeline.outputs]

    def close(self) -> None:
        self._pipeline.close()
