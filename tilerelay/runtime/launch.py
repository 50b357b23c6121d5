"""One kernel launch with all its arguments: the same for GPUs and for virtual devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tilerelay.graph.workload import Stage
from tilerelay.kernels.activation import CODES
from tilerelay.kernels.call import Piece, gemm_call
from tilerelay.kernels.config import KernelConfig
from tilerelay.kernels.protocol import COUNT, COUNTER, ORDER, PUSH, QUEUE, SILENT, Hooks
from tilerelay.kernels.relay import BULK, IN_TURN, RELAY, RELAY_BUT_LAST, RELAYS, Relay
from tilerelay.runtime.workspace import Workspace

TIMEOUT_US = 10_000_000  # of kernels that run on their own, outside a pipeline


def make_piece(
    workspace: Workspace,
    stage: int,
    a: torch.Tensor,
    b: torch.Tensor,
    copies: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    *,
    way: int = BULK.value,
    relay: Relay | None = None,
    listen: bool = True,
    announce: bool = True,
) -> Piece:
    """A stage's segment of a kernel.

    Args:
        a, b: [M, K], [N, K].
        copies: [M, N], everywhere that the output is stored.
        bias: [N] or None.
        way, relay: how tiles get to other devices (`way_of`), and what they are relayed by (`relay_of`).
        listen: wait for the producers' tiles; False: the inputs are known to be complete.
        announce: publish finished tiles; False: nobody reads them in this run.
    """
    if (relay is None) == (way in RELAYS):
        raise ValueError(f"tiles get to other devices in way {way} of kernels.relay, with relay={relay}")
    layout = workspace.layout
    queue = layout.signalling == "queue"
    home, edges = layout.placement.device_of(stage), layout.workload.edges
    is_here = {edge: layout.placement.device_of(edges[edge].consumer) == home for edge in layout.out_edges(stage)}
    into = layout.in_edges(stage) if listen else []
    out = sorted(is_here, key=lambda edge: not is_here[edge]) if announce else []
    hooks = Hooks(
        source=(ORDER if not into else QUEUE if queue else COUNTER).value,
        signal=(SILENT if not out else PUSH if queue else COUNT).value,
        group_entries=layout.edge_numbers(out[0]).group_entries if out else True,
        readers=len(out),
        copies=len(copies),
        way=way,
        in_steps=bool(into) and edges[into[0]].dependencies.num_steps > 1,
        kept=way == IN_TURN.value and bool(out) and is_here[out[0]],
    )
    activation = CODES[layout.workload.stages[stage].activation]
    return Piece(a, b, tuple(copies), workspace.segment(stage, into, out, bias, relay), hooks, activation)


def way_of(kind: str, stage: Stage, copies: int, sms: int, *, last: bool, read_later: bool) -> int:
    """How a stage's tiles get to other devices (kernels.relay): in bulk where somebody waits for each of them.

    That is so for a single wave of tiles, for walks, whose CTAs all end together, for what ends the run, and where
    readers run at the same time; in turn, where the graph says so. Where the next stage comes after this one, and
    begins with tiles of an earlier wave, what counts is that SMs can load meanwhile.

    Args:
        copies: of its output; one of them is on its own device if it is the last stage, or read later there.
        sms: at most so many tiles are computed at once.
        last: nothing comes after the stage.
        read_later: what reads it on its own device comes after it.
    """
    if stage.under_way:
        return int(IN_TURN.value)
    follows = last or read_later
    if kind != "persistent" or not follows or copies == 1 or stage.walk or stage.grid.tiles <= sms:
        return int(BULK.value)
    return int(RELAY_BUT_LAST.value if last else RELAY.value)


def relay_of(copies: Sequence[torch.Tensor]) -> Relay:
    """All copies but the last, where a kernel finds their addresses."""
    *peers, own = copies
    return Relay(own, torch.tensor([copy.data_ptr() for copy in peers], dtype=torch.int64, device=own.device))


def balanced_grid(tiles: Sequence[int], sms: int) -> int:
    """CTAs of a persistent grid: as few as finish every segment in the same number of waves.

    A wave that is a whole number of row panels completes them all, and the SMs left out draw no power.

    Args:
        tiles: of each segment that the kernel walks over.
    """
    return max(-(-count // -(-count // sms)) for count in tiles)


def grid_of(kind: str, stages: Sequence[Stage], sms: int) -> int:
    """CTAs of a kernel that computes these stages: one for each tile, or, persistent, at most one for each SM."""
    tiles = [stage.grid.tiles for stage in stages]
    if kind != "persistent":
        return sum(tiles)
    walks = {stage.walk.ctas for stage in stages if stage.walk}
    if len(walks) > 1:
        raise ValueError(f"walks for {sorted(walks)} CTAs in one kernel")
    return walks.pop() if walks else balanced_grid(tiles, sms)


class Launch:
    """A kernel with all its arguments; calling it enqueues the kernel on the current stream.

    Args:
        pieces: the segments that it walks over.
        grid: number of CTAs.
    """

    def __init__(
        self, config: KernelConfig, pieces: Sequence[Piece], workspace: Workspace, grid: int, timeout_us: int
    ) -> None:
        words = 2 * len(workspace.layout.workload.stages)
        kernel, self._arguments, self._options = gemm_call(
            config, pieces, words=words, timeout_us=timeout_us, stride=workspace.layout.stride
        )
        self._kernel: Any = kernel
        self._grid = (grid,)

    def load(self) -> None:
        """Compile the kernel and load it on the current GPU, without launching it."""
        compiled = self._kernel.warmup(*self._arguments, grid=self._grid, **self._options)
        compiled.run  # noqa: B018  Triton loads a kernel when its launcher is first looked at

    def __call__(self) -> None:
        self._kernel[self._grid](*self._arguments, **self._options)
