"""tilerelay: one batch through a chain of dependent GPU kernels on several GPUs, tile by tile."""

from typing import TYPE_CHECKING, Any

from tilerelay.errors import (
    InvalidInput,
    PipelineAborted,
    PlacementError,
    ShapeError,
    TilerelayError,
    UnsupportedMachine,
)
from tilerelay.graph.catalog import dense_chain, gemm_chain, mlp
from tilerelay.graph.placement import Placement, pipelined, sharded, shared

if TYPE_CHECKING:
    from tilerelay.runtime.pipeline import CapturedPipeline, Pipeline

__version__ = "0.1.0"
__all__ = [
    "CapturedPipeline",
    "InvalidInput",
    "Pipeline",
    "PipelineAborted",
    "Placement",
    "PlacementError",
    "ShapeError",
    "TilerelayError",
    "UnsupportedMachine",
    "dense_chain",
    "gemm_chain",
    "mlp",
    "pipelined",
    "sharded",
    "shared",
]


def __getattr__(name: str) -> Any:
    """Import torch and Triton only when a pipeline is wanted: planning needs neither."""
    if name in ("CapturedPipeline", "Pipeline"):
        from tilerelay.runtime import pipeline

        return getattr(pipeline, name)
    raise AttributeError(f"module 'tilerelay' has no attribute {name!r}")
