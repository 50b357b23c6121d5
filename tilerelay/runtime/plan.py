"""The plan of a pipeline: all that is decided and checked before anything is allocated or launched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from tilerelay.errors import InvalidInput, PlacementError, ShapeError
from tilerelay.graph.cut import cut
from tilerelay.graph.placement import Placement, pipelined
from tilerelay.graph.turns import with_turns
from tilerelay.graph.workload import Stage, Workload, with_orders, with_walk
from tilerelay.kernels.config import BLOCK_K, HOPPER_SHARED_BYTES, configure
from tilerelay.protocol.layout import ProtocolLayout
from tilerelay.runtime.checks import DESCRIPTOR_BYTES, check_tensor, check_types, tensors_of
from tilerelay.runtime.cuda import check_machine, shared_memory_limit
from tilerelay.runtime.oracle import TORCH_DTYPES

BACKENDS = ("cuda", "cpu")
LONGEST_WAIT_S = 2000  # microseconds in an int32
Given = Sequence[torch.Tensor | Sequence[torch.Tensor]]


class Plan:
    """What runs where, on which tensors. The arguments are those of `tilerelay.Pipeline`, which says what they mean.

    Attributes:
        cut: the workload in parts, with a tile order for each.
        layout: of the protocol's memory.
        configs, weights, biases: of every part.

    Raises:
        InvalidInput, PlacementError, ShapeError, UnsupportedMachine: see `tilerelay.Pipeline`.
    """

    def __init__(
        self,
        workload: Workload,
        weights: Given,
        biases: Given | None,
        placement: Placement | None,
        *,
        signalling: str | None,
        kernel: str | Sequence[str] | None,
        backend: str | None,
        timeout_s: float,
        hold_back: bool,
        replicate: bool,
        first_epoch: int,
    ) -> None:
        check_types(workload, weights, biases, placement, timeout_s, first_epoch)
        if any(stage.walk for stage in workload.stages):
            raise InvalidInput("a stage has a walk; leave walk=None, the pipeline makes them for the SMs that it gets")
        if any(s.under_way for s in workload.stages) or any(e.dependencies.steps for e in workload.edges):
            raise InvalidInput("a stage has turns or steps; leave under_way=None and steps=(), the pipeline decides")
        if not workload.is_chain:
            raise InvalidInput("the kernels run chains; this workload has stages with several inputs or outputs")
        if len(weights) != len(workload.stages):
            raise ShapeError(f"{len(weights)} weights for {len(workload.stages)} stages")
        first = weights[0] if isinstance(weights[0], torch.Tensor) else weights[0][0]
        self.backend = backend or ("cuda" if first.is_cuda else "cpu")
        if self.backend not in BACKENDS:
            raise InvalidInput(f"unknown backend {backend!r}; choose one of {', '.join(BACKENDS)}")
        if not 1e-6 <= timeout_s <= LONGEST_WAIT_S:
            raise InvalidInput(f"timeout_s={timeout_s}: a wait's deadline must be between 1e-6 and {LONGEST_WAIT_S} s")
        self.workload = workload
        self.placement = placement or pipelined(range(len(workload.stages)))
        # A consumer keeps its own order, which is faster, where nothing asks for its producer's.
        given = [i for i, stage in enumerate(workload.stages) if stage.order is not None]
        follows = self.placement.is_pipelined and (hold_back or given == [0])
        self.signalling = signalling or ("queue" if follows else "counter")
        kernel = kernel or ("persistent" if self.backend == "cuda" else "classical")
        self.kernels = [kernel] * len(workload.stages) if isinstance(kernel, str) else list(kernel)
        self.replicate, self.hold_back = replicate, hold_back
        self.timeout_us, self.first_epoch = int(timeout_s * 1e6), first_epoch
        self._check_placement()
        if self.backend == "cuda":
            check_machine(self.placement.devices)
        self.cut = cut(workload, self.placement)
        is_cut = [parts[0].columns is not None for parts in self.cut.placement.stages]
        ordered = with_orders(self.cut.workload, self._tiles_in_flight(), is_cut)
        self.cut = replace(self.cut, workload=self._with_walks(ordered))
        if self.signalling == "counter":
            persistent = [self.kernels[stage] == "persistent" for stage, _ in self.cut.origin]
            self.cut = replace(self.cut, workload=with_turns(self.cut, self._tiles_in_flight(), persistent))
        self.layout = ProtocolLayout(self.cut.workload, self.cut.placement, self.signalling)
        self.layout.check_kernels_can()
        limit = shared_memory_limit(self.placement.devices[0]) if self.backend == "cuda" else HOPPER_SHARED_BYTES
        stages = self.cut.workload.stages
        in_turn = {
            part for program in self.cut.programs for part in program if any(stages[p].under_way for p in program)
        }
        self.configs = [
            configure(self.kernels[stage], (s.grid.block_m, s.grid.block_n), limit, whole_tile=part in in_turn)
            for part, ((stage, _), s) in enumerate(zip(self.cut.origin, stages, strict=True))
        ]
        self.weights = self._in_parts("weight", weights, lambda part: (part.grid.n, part.k))
        self.biases: list[torch.Tensor | None] = [None] * len(self.weights)
        if biases is not None:
            self.biases = list(self._in_parts("bias", biases, lambda part: (part.grid.n,)))
        self._check_tensors()

    def _check_placement(self) -> None:
        if len(self.placement.stages) != len(self.workload.stages):
            raise PlacementError(
                f"{len(self.placement.stages)} stages are placed, the workload has {len(self.workload.stages)}: "
                f"place every stage"
            )
        if len(self.kernels) != len(self.workload.stages):
            raise InvalidInput(
                f"{len(self.kernels)} kernels for {len(self.workload.stages)} stages; name one, or one for each"
            )
        for stage in range(1, len(self.kernels)):
            before, after = self.placement.stages[stage - 1 : stage + 1]
            at_once = {part.device for part in before} & {part.device for part in after if part.columns is None}
            if self.kernels[stage] == "classical" and at_once:
                instead = (
                    "another device"
                    if self.backend == "cpu"
                    else "kernel='persistent' with SM shares, or another device"
                )
                raise PlacementError(
                    f"stage {stage}: a classical consumer on its producer's device {at_once.pop()} can keep it from "
                    f"running; use {instead}"
                )
        if self.backend == "cpu" and set(self.kernels) != {"classical"}:
            raise InvalidInput("virtual devices run the classical kernel; use kernel='classical'")
        if self.replicate and self.placement.stages[-1][0].columns is None:
            raise InvalidInput("replicate keeps an output whole that is cut by columns; this one is not cut")
        if self.hold_back and not self.placement.is_pipelined:
            raise InvalidInput("hold_back waits for a queue's first entry, and cut stages have none; leave them uncut")
        if self.hold_back and self.signalling != "queue":
            raise InvalidInput("hold_back waits for a queue's first entry; use signalling='queue'")
        if self.backend == "cpu" and self.hold_back:
            raise InvalidInput("hold_back holds a GPU stream back; virtual devices have none")

    def _in_parts(
        self,
        what: str,
        given: Sequence[torch.Tensor | Sequence[torch.Tensor]],
        shape: Callable[[Stage], tuple[int, ...]],
    ) -> list[torch.Tensor]:
        """One tensor for each part of each stage, where the part is computed; checked."""
        if len(given) != len(self.workload.stages):
            raise ShapeError(f"{what}: {len(given)} given for {len(self.workload.stages)} stages; give one for each")
        tensors = []
        for index, whole in enumerate(given):
            stage, parts = self.workload.stages[index], self.cut.parts_of(index)
            if isinstance(whole, torch.Tensor):
                if len(parts) == 1:
                    rows = [whole]
                else:
                    self._check_tensor(f"{what} of {stage.name}", whole, shape(stage), whole.device)
                    rows = [whole[slice(*self.cut.columns[part])].to(self.device(part), copy=True) for part in parts]
            else:
                rows = list(whole)
            if len(rows) != len(parts):
                raise ShapeError(
                    f"{what} of {stage.name}: {len(rows)} pieces for {len(parts)} parts; "
                    f"give one for each, or the whole"
                )
            for part, tensor in zip(parts, rows, strict=True):
                placed = self.cut.workload.stages[part]
                self._check_tensor(f"{what} of {placed.name}", tensor, shape(placed), self.device(part))
            tensors += rows
        return tensors

    def _check_tensors(self) -> None:
        for stage, bias in zip(self.cut.workload.stages, self.biases, strict=True):
            if stage.bias != (bias is not None):
                raise ShapeError(
                    f"{stage.name}: the workload says bias={stage.bias}, but a bias is "
                    f"{'missing' if bias is None else 'given'}"
                )
            for name, size in (("k", stage.k), ("n", stage.grid.n)):
                if size * 2 % DESCRIPTOR_BYTES:
                    raise ShapeError(f"{stage.name}: {name}={size} is not a multiple of 8; pad the weight with zeros")

    def _tiles_in_flight(self) -> list[int]:
        """How many tiles each part's device computes at once; a virtual device computes one."""
        if self.backend == "cpu":
            return [1] * len(self.cut.origin)
        sms = check_machine(self.placement.devices)
        return [parts[0].sms or sms[parts[0].device] for parts in self.cut.placement.stages]

    def _in_any_part(self, test: Callable[[Stage], bool]) -> list[bool]:
        """Of each stage, whether it holds for any of its parts."""
        parts_of = map(self.cut.parts_of, range(len(self.workload.stages)))
        return [any(test(self.cut.workload.stages[part]) for part in parts) for parts in parts_of]

    @property
    def shares_sums(self) -> list[bool]:
        """Of each stage, whether CTAs share tiles' sums."""
        return self._in_any_part(lambda stage: stage.walk is not None)

    @property
    def sends_in_turn(self) -> list[bool]:
        """Of each stage, whether its tiles are sent to other devices in turn."""
        return self._in_any_part(lambda stage: stage.under_way is not None)

    def _with_walks(self, workload: Workload) -> Workload:
        """Even work for all CTAs in the parts of cut stages; others are read while they are made, panel by panel.

        Not where the tile order is given: by the user, or by a queue.
        """
        in_flight = self._tiles_in_flight()
        fed = {edge.consumer for edge in workload.edges} if self.signalling == "queue" else set()

        def may_walk(part: int) -> bool:
            original = self.cut.origin[part][0]
            is_cut = self.cut.placement.stages[part][0].columns is not None
            free = self.workload.stages[original].order is None and part not in fed
            return is_cut and free and self.kernels[original] == "persistent"

        stages = tuple(
            with_walk(stage, in_flight[i], unit=BLOCK_K) if may_walk(i) else stage
            for i, stage in enumerate(workload.stages)
        )
        return replace(workload, stages=stages)

    def device(self, part: int) -> torch.device:
        return (
            torch.device("cpu") if self.backend == "cpu" else torch.device("cuda", self.cut.placement.device_of(part))
        )

    def _check_tensor(self, what: str, tensor: torch.Tensor, shape: tuple[int, ...], device: torch.device) -> None:
        check_tensor(what, tensor, shape, TORCH_DTYPES[self.workload.dtype], device)

    def check_x(self, x: object) -> list[torch.Tensor]:
        """x for every part of the first stage, or once, on the first one's device.

        Raises:
            InvalidInput, ShapeError: x is no tensor, or does not fit.
        """
        first, homes = self.workload.stages[0], [self.device(part) for part in self.cut.parts_of(0)]
        given = tensors_of(x)
        if len(given) not in (1, len(homes)):
            raise ShapeError(f"x is given {len(given)} times; give it once, or on each of {len(homes)} devices")
        for tensor, home in zip(given, homes, strict=False):
            self._check_tensor("x", tensor, (first.grid.m, first.k), home)
        return given
