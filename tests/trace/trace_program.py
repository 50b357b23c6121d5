"""What workers that interpret do for the tests of clocks and of a stage alone."""

from __future__ import annotations

from typing import Any

import torch

from tilerelay.graph.workload import Workload
from tilerelay.kernels.config import configure
from tilerelay.kernels.ping import ping, pong
from tilerelay.runtime.protocol_cost import ProducerAlone
from tilerelay.runtime.virtual_memory import SharedTensors

EXCHANGES = 30
SHAPES: dict[Any, Any] = {
    **{word: ((1,), torch.int32) for word in ("reference", "other")},
    **{stamps: ((EXCHANGES,), torch.int64) for stamps in ("sent", "answered", "arrived")},
}


class PingProgram:
    """One side of the ping-pong."""

    def __init__(self, fd: int) -> None:
        self.tensors = SharedTensors(SHAPES, fd)

    def ping(self, polls: int) -> None:
        t = self.tensors
        ping[(1,)](t["reference"], t["other"], t["sent"], t["answered"], EXCHANGES, polls)

    def pong(self, polls: int) -> None:
        t = self.tensors
        pong[(1,)](t["other"], t["reference"], t["arrived"], EXCHANGES, polls)


class AloneProgram:
    """A stage alone on a virtual device."""

    def __init__(self, fd: int) -> None:
        pass

    def run(self, workload: Workload, consumer: int, announce: bool, runs: int) -> dict[str, Any]:
        """What can be seen of it after some runs."""
        stage = workload.stages[0]
        x = torch.randn(stage.grid.m, stage.k).bfloat16()
        weight = torch.randn(stage.grid.n, stage.k).bfloat16()
        out = torch.full((stage.grid.m, stage.grid.n), float("nan")).bfloat16()
        alone = ProducerAlone(
            workload, configure("classical", (64, 64)), x, weight, out, device=0, consumer=consumer,
            announce=announce, stamps=True, sms=1, torch_device=lambda _: torch.device("cpu"),
        )  # fmt: skip
        for _ in range(runs):
            alone()
        workspace = alone.workspace
        return {
            "error": float((out.float() - x.float() @ weight.float().T).abs().max()),
            "epoch": int(workspace.stage(0, "epoch")),
            "counters": workspace.edge(0, "scoreboard").tolist(),
            "ring": [entry >> 32 for entry in workspace.edge(0, "ring").tolist()],
            "times": alone.trace("monotonic").times.tolist(),
        }
