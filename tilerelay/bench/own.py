"""The library's own method as the harness sees it: the pipelined placement, with both kinds of signalling."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tilerelay.baselines.cell import Cell
from tilerelay.baselines.lanes import Lanes
from tilerelay.baselines.method import Lives, Piece, Variant, layers_fill_gpus
from tilerelay.baselines.operands import Operands
from tilerelay.graph.library import dense_chain
from tilerelay.graph.placement import pipelined
from tilerelay.runtime.pipeline import Pipeline

SIGNALLING = ("queue", "counter")


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


class PipelineLaunch:
    """A pipeline and its CUDA graph; closes the pipeline with itself."""

    def __init__(self, pipeline: Any, x: torch.Tensor, timing: str) -> None:
        self._pipeline = pipeline
        self._run: Callable[[], object] = pipeline.capture(x).replay if timing == "graph" else lambda: pipeline(x)

    def replay(self) -> None:
        self._run()

    def finish(self) -> None:
        """Raises PipelineAborted when a wait ran past its deadline."""
        self._pipeline.synchronize()

    def pieces(self) -> list[Piece]:
        return [Piece(self._pipeline.y)]

    def poison(self) -> list[torch.Tensor]:
        return [*self._pipeline.intermediates, self._pipeline.y]

    def close(self) -> None:
        self._pipeline.close()
