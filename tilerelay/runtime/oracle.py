"""What a pipeline must equal bit for bit: the same kernels, layer by layer, on one device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilerelay.graph.placement import Part, Placement
from tilerelay.graph.workload import Workload
from tilerelay.kernels.config import KernelConfig
from tilerelay.protocol.layout import ProtocolLayout
from tilerelay.runtime.launch import TIMEOUT_US, Launch, grid_of, make_piece
from tilerelay.runtime.workspace import Workspace, new_records

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class LayerByLayer:
    """The stages one after the other on one device, each alone and whole.

    Args:
        weights: [N, K] of every stage; copied to `device` where they live elsewhere.
        biases: [N] or None of every stage.
        configs: kernel of every stage.
        sms: CTAs of a persistent grid.
    """

    def __init__(
        self,
        workload: Workload,
        weights: Sequence[torch.Tensor | None],
        biases: Sequence[torch.Tensor | None],
        configs: Sequence[KernelConfig],
        device: torch.device,
        sms: int,
    ) -> None:
        self._workload, self._configs, self._sms = workload, configs, sms
        self._weights = [w.to(device) for w in weights if w is not None]
        self._biases = [None if b is None else b.to(device) for b in biases]
        dtype = TORCH_DTYPES[workload.dtype]
        self.outputs = [torch.empty(s.grid.m, s.grid.n, dtype=dtype, device=device) for s in workload.stages]
        layout = ProtocolLayout(workload, Placement(tuple((Part(0, 1),) for _ in workload.stages)), "counter")
        memory = torch.empty(layout.size(0), dtype=torch.uint8, device=device)
        records = new_records(len(workload.stages), device.type)
        workspace = Workspace(layout, {0: memory}, records, lambda words, _: words.to(device))
        workspace.reset()
        self._workspace = workspace

    def run(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The outputs [M, N] of all stages, on the current stream; overwritten by the next run."""
        for i, (stage, config) in enumerate(zip(self._workload.stages, self._configs, strict=True)):
            source, out = self.outputs[i - 1] if i else x, [self.outputs[i]]
            piece = make_piece(
                self._workspace, i, source, self._weights[i], out, self._biases[i], listen=False, announce=False
            )
            Launch(config, [piece], self._workspace, grid_of(config.kind, [stage], self._sms), TIMEOUT_US)()
        return self.outputs


def whole_rows(parts: Sequence[torch.Tensor | None], device: torch.device) -> torch.Tensor | None:
    """The rows of a stage's parts as one tensor on a device; None where a stage has no bias."""
    rows = [part.to(device) for part in parts if part is not None]
    return torch.cat(rows) if len(rows) > 1 else rows[0] if rows else None
