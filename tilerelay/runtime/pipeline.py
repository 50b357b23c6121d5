"""The public object: a workload with its weights, placed on devices, ready to run as one pipeline."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from tilerelay.errors import InvalidInput, PipelineAborted
from tilerelay.graph.placement import Placement
from tilerelay.graph.workload import Workload, with_orders
from tilerelay.kernels.protocol import EVENTS
from tilerelay.runtime import diagnosis
from tilerelay.runtime.cuda_pipeline import CudaGraphRun, CudaPipeline
from tilerelay.runtime.oracle import LayerByLayer, whole_rows
from tilerelay.runtime.plan import Plan
from tilerelay.runtime.virtual import VirtualPipeline

IN_USE = "another thread is running this pipeline; give each thread its own, or take turns"


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
        signalling: "queue" (tiles in the order in which they become ready; a consumer's own order is not used) or
            "counter" (each stage keeps its order). Default: counter; unless a stage is cut, queue where the first stage
            alone was given a tile order, or with `hold_back`.
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
        self._alone = threading.Lock()
        plan = self._plan = Plan(
            workload, weights, biases, placement, signalling=signalling, kernel=kernel, backend=backend,
            timeout_s=timeout_s, hold_back=hold_back, replicate=replicate, first_epoch=first_epoch,
        )  # fmt: skip
        self.workload, self.placement, self.signalling = plan.workload, plan.placement, plan.signalling
        self.kernels, self.backend, self.replicate = plan.kernels, plan.backend, plan.replicate
        self._cut, self._configs, self._weights, self._biases = plan.cut, plan.configs, plan.weights, plan.biases
        if trace:
            from tilerelay.runtime.tracing import check_room, free_bytes  # which needs this module's pipelines

            check_room(self._cut.workload, self._cut.placement, free_bytes(self.backend))
        make: Any = CudaPipeline if self.backend == "cuda" else VirtualPipeline
        self._run: CudaPipeline | VirtualPipeline = make(
            plan.cut, plan.weights, plan.biases, plan.layout, plan.configs, replicate=replicate,
            timeout_us=plan.timeout_us, hold_back=hold_back, stamps=trace, first_epoch=first_epoch,
        )  # fmt: skip
        self._raise_if_aborted()
        self._closed = False

    def _check_x(self, x: object) -> list[torch.Tensor]:
        self._check_open()
        return self._plan.check_x(x)

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
        self._check_open()
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
        if not self._alone.acquire(blocking=False):
            raise InvalidInput(IN_USE)
        try:
            self._raise_if_aborted()
            self._run.run(given)
            if self.backend == "cpu":
                self._raise_if_aborted()
        finally:
            self._alone.release()
        return self._result()

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidInput("this pipeline is closed")

    def _result(self) -> torch.Tensor | list[torch.Tensor]:
        return self.outputs if len(self.outputs) > 1 and not self.replicate else self.y

    def capture(self, x: torch.Tensor | Sequence[torch.Tensor], *, all_streams: bool = True) -> CapturedPipeline:
        """Capture a run in one CUDA graph over all devices. It reads x's storage: refill x in place between replays.

        Args:
            all_streams: a replay comes after what you have enqueued on the current streams of all the pipeline's
                devices, and before what you enqueue there next. False: as with any CUDA graph, it is ordered on the
                stream that it is launched on, the current one of the first stage's (first) device; what you do on
                other devices (refill x, read y) you order yourself. That spares the host a look at their streams,
                12 to 20 us after a rest.

        Raises:
            InvalidInput: virtual devices, or `hold_back` (a captured wait value is stale at the second replay).
        """
        given = self._check_x(x)
        if not isinstance(self._run, CudaPipeline):
            raise InvalidInput("a CUDA graph needs GPUs; on virtual devices call the pipeline")
        if self._plan.hold_back:
            raise InvalidInput("hold_back works in eager runs only; make a pipeline without it to capture")
        with self._alone:
            return CapturedPipeline(self, self._run.capture(given, all_streams=all_streams))

    def synchronize(self) -> None:
        """Wait for all runs.

        Raises:
            PipelineAborted: one of them was ended; the pipeline has been reset and can be run again.
        """
        self._check_open()
        with self._alone:
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
        device = self._plan.device(0)
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        parts = [self._cut.parts_of(stage) for stage in range(len(self.workload.stages))]
        weights = [whole_rows([self._weights[part] for part in of_stage], device) for of_stage in parts]
        biases = [whole_rows([self._biases[part] for part in of_stage], device) for of_stage in parts]
        configs = [self._configs[of_stage[0]] for of_stage in parts]
        with torch.cuda.device(device):
            whole = with_orders(self.workload, [sms] * len(parts))
            return LayerByLayer(whole, weights, biases, configs, device, sms).run(x)

    def describe(self) -> dict[str, Any]:
        """What runs: backend, devices, placement, signalling, kernels, tiles, who shares sums, who sends in turn."""
        configs = [self._configs[self._cut.parts_of(stage)[0]] for stage in range(len(self.workload.stages))]
        return {
            "backend": self.backend,
            "devices": list(self.placement.devices),
            "placement": f"{self.placement.kind}: {self.placement}",
            "replicate": self.replicate,
            "signalling": self.signalling,
            "kernel": "+".join(dict.fromkeys(self.kernels)),
            "tile": [[c.block_m, c.block_n, c.block_k] for c in configs],
            "shares_sums": self._plan.shares_sums,
            "sends_in_turn": self._plan.sends_in_turn,
        }

    def close(self) -> None:
        """Wait for outstanding runs and free everything. Closing twice is allowed."""
        with self._alone:
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
        self._alone, self._launch = pipeline._alone, run.replay

    @property
    def y(self) -> torch.Tensor:
        """The pipeline's output [M, N]."""
        return self._pipeline.y

    def replay(self) -> torch.Tensor | list[torch.Tensor]:
        """Launch the graph on the current stream of the first stage's device; returns what the pipeline would.

        Raises:
            InvalidInput: the pipeline is closed. PipelineAborted: an earlier run was ended, so this one is void, too.
        """
        if not self._alone.acquire(blocking=False):
            raise InvalidInput(IN_USE)
        try:
            if self._pipeline._closed:
                raise InvalidInput("the pipeline of this graph is closed")
            self._launch()
            self._pipeline._raise_if_aborted()
        finally:
            self._alone.release()
        return self._pipeline._result()
