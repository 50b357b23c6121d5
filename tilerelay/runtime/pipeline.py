"""The public object: a workload with its weights, placed on devices, ready to run as one pipeline."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from tilerelay.errors import InvalidInput, PipelineAborted, PlacementError, ShapeError
from tilerelay.graph.cut import cut
from tilerelay.graph.placement import Placement, pipelined
from tilerelay.graph.workload import Stage, Workload, with_orders
from tilerelay.kernels.config import HOPPER_SHARED_BYTES, configure
from tilerelay.kernels.protocol import EVENTS
from tilerelay.protocol.layout import ProtocolLayout
from tilerelay.runtime import diagnosis
from tilerelay.runtime.checks import DESCRIPTOR_BYTES, check_tensor, check_types, tensors_of
from tilerelay.runtime.cuda import check_machine, shared_memory_limit
from tilerelay.runtime.cuda_pipeline import CudaGraphRun, CudaPipeline
from tilerelay.runtime.oracle import TORCH_DTYPES, LayerByLayer, whole_rows
from tilerelay.runtime.virtual import VirtualPipeline

BACKENDS = ("cuda", "cpu")
LONGEST_WAIT_S = 2000  # microseconds in an int32


class Pipeline:
    """All stages of a chain in flight at once, tile by tile.

    On GPUs, stage i's weight lives on stage i's device, `x` on the first stage's and `y` on the last one's. A stage
    that the placement cuts by columns is computed on several devices at once, each tile going to every device that
    reads it: `x` then lives on each of the first stage's devices, and the output is cut, too, or on all of them.
    Without a GPU the same protocol and kernel run on virtual devices: processes on the CPU. The constructor checks
    everything, allocates, compiles, loads and runs once; after it, a run allocates nothing.

    Args:
        workload: a chain (`gemm_chain`, `mlp`, `dense_chain`).
        weights: [N, K] for every stage, as `nn.Linear` keeps them. Of a stage that is cut, a sequence of its parts'
            rows, each on its part's device; or the whole, from which they are copied.
        biases: [N] for every stage of a workload made with `bias=True`; cut stages as for weights.
        placement: default: stage i on device i.
        signalling: "queue" (tiles in the order in which they become ready) or "counter" (each stage keeps its order);
            default: queue, or counter where a stage is cut.
        replicate: of a last stage that is cut, keep the whole output on all its devices.
        kernel: "persistent" or "classical", one for all stages or one for each; default: persistent on GPUs,
            classical on virtual devices.
        backend: "cuda" or "cpu"; default: where the weights are.
        timeout_s: deadline of every single wait.
        hold_back: hold each consumer's stream until its first tile is ready (eager runs only; paper, III.A.5).
        trace: keep the times of every tile of the last run (`stamps`); without it the kernels have no code for it.
        first_epoch: number of the first run (for tests of wrap-around).

    Raises:
        InvalidInput, PlacementError, ShapeError, UnsupportedMachine: before anything is launched; the message says
            what to do.
    """

    def __init__(
        self,
        workload: Workload,
        weights: Sequence[torch.Tensor | Sequence[torch.Tensor]],
        *,
        biases: Sequence[torch.Tensor | Sequence[torch.Tensor]] | None = None,
        placement: Placement | None = None,
        signalling: str | None = None,
        kernel: str | Sequence[str] | None = None,
        backend: str | None = None,
        timeout_s: float = 10.0,
        hold_back: bool = False,
        replicate: bool = False,
        trace: bool = False,
        first_epoch: int = 1,
    ) -> None:
        self._closed = True  # until everything is there
        self._busy = threading.Lock()
        check_types(workload, weights, biases, placement, timeout_s, first_epoch)
        if not workload.is_chain:
            raise InvalidInput("the kernels run chains; this workload has stages with several inputs or outputs")
        if len(weights) != len(workload.stages):
            raise ShapeError(f"{len(weights)} weights for {len(workload.stages)} stages")
        first = weights[0] if isinstance(weights[0], torch.Tensor) else weights[0][0]
        backend = backend or ("cuda" if first.is_cuda else "cpu")
        if backend not in BACKENDS:
            raise InvalidInput(f"unknown backend {backend!r}; choose one of {', '.join(BACKENDS)}")
        if not 1e-6 <= timeout_s <= LONGEST_WAIT_S:
            raise InvalidInput(f"timeout_s={timeout_s}: a wait's deadline must be between 1e-6 and {LONGEST_WAIT_S} s")
        self.workload = workload
        self.placement = placement or pipelined(range(len(workload.stages)))
        self.signalling = signalling or ("queue" if self.placement.is_pipelined else "counter")
        kernel = kernel or ("persistent" if backend == "cuda" else "classical")
        self.kernels = [kernel] * len(workload.stages) if isinstance(kernel, str) else list(kernel)
        self.backend = backend
        self.replicate = replicate
        self._hold_back = hold_back
        self._check_placement()
        if backend == "cuda":
            check_machine(self.placement.devices)
        self._cut = cut(workload, self.placement)
        is_cut = [parts[0].columns is not None for parts in self._cut.placement.stages]
        ordered = with_orders(self._cut.workload, self._tiles_in_flight(), is_cut)
        self._cut = replace(self._cut, workload=ordered)
        layout = ProtocolLayout(self._cut.workload, self._cut.placement, self.signalling)
        layout.check_kernels_can()
        limit = shared_memory_limit(self.placement.devices[0]) if backend == "cuda" else HOPPER_SHARED_BYTES
        self._configs = [
            configure(self.kernels[stage], (s.grid.block_m, s.grid.block_n), limit)
            for (stage, _), s in zip(self._cut.origin, self._cut.workload.stages, strict=True)
        ]
        self._weights = self._in_parts("weight", weights, lambda part: (part.grid.n, part.k))
        self._biases: list[torch.Tensor | None] = [None] * len(self._weights)
        if biases is not None:
            self._biases = list(self._in_parts("bias", biases, lambda part: (part.grid.n,)))
        self._check_tensors()
        if trace:
            from tilerelay.runtime.tracing import check_room, free_bytes  # which needs this module's pipelines

            check_room(self._cut.workload, self._cut.placement, free_bytes(backend))
        make: Any = CudaPipeline if backend == "cuda" else VirtualPipeline
        self._run: CudaPipeline | VirtualPipeline = make(
            self._cut, self._weights, self._biases, layout, self._configs, replicate=replicate,
            timeout_us=int(timeout_s * 1e6), hold_back=hold_back, stamps=trace, first_epoch=first_epoch,
        )  # fmt: skip
        self._raise_if_aborted()
        self._closed = False

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
                raise PlacementError(
                    f"stage {stage}: a classical consumer on its producer's device {at_once.pop()} can keep it from "
                    f"running; use kernel='persistent' with SM shares, or another device"
                )
        if self.backend == "cpu" and set(self.kernels) != {"classical"}:
            raise InvalidInput("virtual devices run the classical kernel; use kernel='classical'")
        if self.replicate and self.placement.stages[-1][0].columns is None:
            raise InvalidInput("replicate keeps an output whole that is cut by columns; this one is not cut")
        if self._hold_back and self.signalling != "queue":
            raise InvalidInput("hold_back waits for a queue's first entry; use signalling='queue'")
        if self.backend == "cpu" and self._hold_back:
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
            stage, parts = self.workload.stages[index], self._cut.parts_of(index)
            if isinstance(whole, torch.Tensor):
                if len(parts) == 1:
                    rows = [whole]
                else:
                    self._check_tensor(f"{what} of {stage.name}", whole, shape(stage), whole.device)
                    rows = [whole[slice(*self._cut.columns[part])].to(self._device(part), copy=True) for part in parts]
            else:
                rows = list(whole)
            if len(rows) != len(parts):
                raise ShapeError(
                    f"{what} of {stage.name}: {len(rows)} pieces for {len(parts)} parts; "
                    f"give one for each, or the whole"
                )
            for part, tensor in zip(parts, rows, strict=True):
                placed = self._cut.workload.stages[part]
                self._check_tensor(f"{what} of {placed.name}", tensor, shape(placed), self._device(part))
            tensors += rows
        return tensors

    def _check_tensors(self) -> None:
        for stage, bias in zip(self._cut.workload.stages, self._biases, strict=True):
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
            return [1] * len(self._cut.origin)
        sms = check_machine(self.placement.devices)
        return [parts[0].sms or sms[parts[0].device] for parts in self._cut.placement.stages]

    def _device(self, part: int) -> torch.device:
        return (
            torch.device("cpu") if self.backend == "cpu" else torch.device("cuda", self._cut.placement.device_of(part))
        )

    def _check_tensor(self, what: str, tensor: torch.Tensor, shape: tuple[int, ...], device: torch.device) -> None:
        check_tensor(what, tensor, shape, TORCH_DTYPES[self.workload.dtype], device)

    def _check_x(self, x: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """x for every part of the first stage, or once, on the first one's device."""
        self._check_open()
        first, homes = self.workload.stages[0], [self._device(part) for part in self._cut.parts_of(0)]
        given = tensors_of(x)
        if len(given) not in (1, len(homes)):
            raise ShapeError(f"x is given {len(given)} times; give it once, or on each of {len(homes)} devices")
        for tensor, home in zip(given, homes, strict=False):
            self._check_tensor("x", tensor, (first.grid.m, first.k), home)
        return given

    @property
    def outputs(self) -> list[torch.Tensor]:
        """The last run's output, overwritten by the next run: one tensor for each part of the last stage.

        [M, N] on the last stage's device; of a last stage that is cut, [M, its columns] on each of its devices, or
        with `replicate` [M, N] on each.
        """
        self._check_open()
        return self._run.results

    @property
    def y(self) -> torch.Tensor:
        """The last run's output [M, N], on the last stage's (first) device; overwritten by the next run.

        Raises:
            InvalidInput: the output is cut by columns; see `outputs`.
        """
        if len(self.outputs) > 1 and not self.replicate:
            raise InvalidInput("the output is cut by columns over several devices; use outputs, or replicate=True")
        return self.outputs[0]

    @property
    def intermediates(self) -> list[torch.Tensor]:
        """Outputs [M, N] of all stages but the last, stage by stage, every copy on its reader's device."""
        self._check_open()
        last = len(self.workload.stages) - 1
        return [tensor for (stage, _), tensor in self._run.tensors.items() if stage < last]

    @property
    def stamps(self) -> dict[int, torch.Tensor]:
        """By stage, int64 [tiles, EVENTS]: when each tile of the last run passed each event, ns of its device's clock.

        Raises:
            InvalidInput: the pipeline was made without `trace=True`.
        """
        if not self._run.workspace.stamps:
            raise InvalidInput("no timestamps were kept; make the pipeline with trace=True")
        return {stage: stamps.view(-1, EVENTS.value).cpu() for stage, stamps in self._run.workspace.stamps.items()}

    def __call__(self, x: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
        """Run once. On GPUs this enqueues on the current stream of the first stage's device and returns at once.

        Args:
            x: [M, K] on the first stage's device. Of a first stage that is cut: on each of its devices; or on the
                first one's, from which every run copies it to the others.

        Returns:
            `y` [M, N], or, when it is cut by columns, `outputs`; owned by the pipeline.

        Raises:
            ShapeError: x does not fit. PipelineAborted: this run (virtual devices) or an earlier one (GPUs) was ended.
        """
        given = self._check_x(x)
        if self.backend == "cuda" and torch.cuda.is_current_stream_capturing():
            raise InvalidInput("a pipeline cannot be called in a capture of your own; use its capture(x)")
        with self._alone():
            self._raise_if_aborted()
            self._run.run(given)
            if self.backend == "cpu":
                self._raise_if_aborted()
        return self._result()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One thread at a time: runs share their buffers.

        Raises:
            InvalidInput: another thread is launching a run.
        """
        if not self._busy.acquire(blocking=False):
            raise InvalidInput("another thread is running this pipeline; give each thread its own, or take turns")
        try:
            yield
        finally:
            self._busy.release()

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidInput("this pipeline is closed")

    def _result(self) -> torch.Tensor | list[torch.Tensor]:
        return self.outputs if len(self.outputs) > 1 and not self.replicate else self.y

    def capture(self, x: torch.Tensor | Sequence[torch.Tensor]) -> CapturedPipeline:
        """Capture a run in one CUDA graph over all devices. It reads x's storage: refill x in place between replays.

        Raises:
            InvalidInput: virtual devices, or `hold_back` (a captured wait value is stale at the second replay).
        """
        given = self._check_x(x)
        if not isinstance(self._run, CudaPipeline):
            raise InvalidInput("a CUDA graph needs GPUs; on virtual devices call the pipeline")
        if self._hold_back:
            raise InvalidInput("hold_back works in eager runs only; make a pipeline without it to capture")
        return CapturedPipeline(self, self._run.capture(given))

    def synchronize(self) -> None:
        """Wait for all runs.

        Raises:
            PipelineAborted: one of them was ended; the pipeline has been reset and can be run again.
        """
        self._check_open()
        self._run.synchronize()
        self._raise_if_aborted()

    def _raise_if_aborted(self) -> None:
        if not self._run.workspace.aborted:
            return
        self._run.synchronize()
        waits = diagnosis.describe(self._run.workspace, [stage for stage, _ in self._cut.origin])
        self._run.reset()
        raise PipelineAborted("a wait ran past its deadline:\n  " + "\n  ".join(waits), waits)

    def oracle(self, x: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """All stages' outputs from the same kernels, layer by layer on the first stage's device; equal bit for bit."""
        x = self._check_x(x)[0]
        if isinstance(self._run, VirtualPipeline):
            return self._run.oracle(x)
        device = self._device(0)
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        parts = [self._cut.parts_of(stage) for stage in range(len(self.workload.stages))]
        weights = [whole_rows([self._weights[part] for part in of_stage], device) for of_stage in parts]
        biases = [whole_rows([self._biases[part] for part in of_stage], device) for of_stage in parts]
        configs = [self._configs[of_stage[0]] for of_stage in parts]
        with torch.cuda.device(device):
            whole = with_orders(self.workload, [sms] * len(parts))
            return LayerByLayer(whole, weights, biases, configs, device, sms).run(x)

    def describe(self) -> dict[str, Any]:
        """What runs: backend, devices, placement, signalling, kernels, and the stages' tile shapes."""
        configs = [self._configs[self._cut.parts_of(stage)[0]] for stage in range(len(self.workload.stages))]
        return {
            "backend": self.backend,
            "devices": list(self.placement.devices),
            "placement": f"{self.placement.kind}: {self.placement}",
            "replicate": self.replicate,
            "signalling": self.signalling,
            "kernel": "+".join(dict.fromkeys(self.kernels)),
            "tile": [[c.block_m, c.block_n, c.block_k] for c in configs],
        }

    def close(self) -> None:
        """Wait for outstanding runs and free everything. Closing twice is allowed."""
        if not self._closed:
            self._closed = True
            self._run.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """Close; raises PipelineAborted when a run was ended and nothing else is being raised."""
        try:
            if error is None and not self._closed:
                self.synchronize()
        finally:
            self.close()


class CapturedPipeline:
    """A captured run of a pipeline; replay it any number of times."""

    def __init__(self, pipeline: Pipeline, run: CudaGraphRun) -> None:
        self._pipeline, self._run = pipeline, run

    @property
    def y(self) -> torch.Tensor:
        """The pipeline's output [M, N]."""
        return self._pipeline.y

    def replay(self) -> torch.Tensor | list[torch.Tensor]:
        """Launch the graph on the current stream of the first stage's device; returns what the pipeline would.

        Raises:
            InvalidInput: the pipeline is closed. PipelineAborted: an earlier run was ended, so this one is void, too.
        """
        if self._pipeline._closed:
            raise InvalidInput("the pipeline of this graph is closed")
        with self._pipeline._alone():
            self._run.replay()
            self._pipeline._raise_if_aborted()
        return self._pipeline._result()
