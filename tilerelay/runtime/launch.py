"""One stage's kernel with all its arguments: the same for GPUs and for virtual devices."""

from __future__ import annotations

from typing import Any

import torch

from tilerelay.graph.workload import Stage
from tilerelay.kernels.activation import CODES
from tilerelay.kernels.call import gemm_call
from tilerelay.kernels.config import KernelConfig
from tilerelay.kernels.protocol import COUNT, COUNTER, ORDER, PUSH, QUEUE, SILENT
from tilerelay.protocol.layout import EdgeNumbers
from tilerelay.runtime.workspace import Workspace

_NO_EDGE = EdgeNumbers(entries=1, ring_mask=0, group_size=1, largest_group=1, group_entries=True)


def stage_arguments(
    workspace: Workspace,
    index: int,
    *,
    timeout_us: int,
    listen: bool = True,
    announce: bool = True,
) -> dict[str, Any]:
    """Everything that a stage's kernel is handed but its tensors and its block shape.

    Args:
        listen: wait for the producers' tiles; False: the inputs are known to be complete.
        announce: publish finished tiles; False: nobody reads them in this run.
    """
    layout = workspace.layout
    workload, signalling = layout.workload, layout.signalling
    stage = workload.stages[index]
    in_edge = next((i for i, e in enumerate(workload.edges) if e.consumer == index), None) if listen else None
    out_edge = next((i for i, e in enumerate(workload.edges) if e.producer == index), None) if announce else None
    incoming = _NO_EDGE if in_edge is None else layout.edge_numbers(in_edge)
    outgoing = _NO_EDGE if out_edge is None else layout.edge_numbers(out_edge)
    return {
        "control": workspace.control(index),
        "inbox": workspace.no_inbox(index) if in_edge is None else workspace.inbox(in_edge),
        "outbox": workspace.no_outbox(index) if out_edge is None else workspace.outbox(out_edge),
        "stage": index,
        "words": 2 * len(workload.stages),
        "timeout_us": timeout_us,
        "tiles": stage.grid.tiles,
        "tiles_n": stage.grid.cols,
        "n": stage.grid.n,
        "in_entries": incoming.entries,
        "in_mask": incoming.ring_mask,
        "in_group": incoming.group_size,
        "out_mask": outgoing.ring_mask,
        "out_group": outgoing.largest_group,
        "SOURCE": ORDER if in_edge is None else (QUEUE if signalling == "queue" else COUNTER),
        "SIGNAL": SILENT if out_edge is None else (PUSH if signalling == "queue" else COUNT),
        "GROUP_ENTRIES": outgoing.group_entries,
        "STRIDE": layout.stride,
        "HAS_BIAS": stage.bias,
        "ACTIVATION": CODES[stage.activation],
    }


class StageLaunch:
    """One stage's kernel with all its arguments; calling it enqueues the kernel on the current stream.

    Args:
        a, b, c: [M, K], [N, K], [M, N]; c may be memory of a peer.
        bias: [N] or None.
        arguments: see `stage_arguments`.
        sms: CTAs of a persistent grid, one per SM; a classical grid has a CTA per tile.
    """

    def __init__(
        self,
        config: KernelConfig,
        stage: Stage,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        bias: torch.Tensor | None,
        arguments: dict[str, Any],
        sms: int,
    ) -> None:
        kernel, self._arguments, self._options = gemm_call(config, a, b, c, bias, arguments)
        ctas = min(sms, stage.grid.tiles) if config.kind == "persistent" else stage.grid.tiles
        self._kernel: Any = kernel[(ctas,)]

    def __call__(self) -> None:
        self._kernel(*self._arguments, **self._options)
