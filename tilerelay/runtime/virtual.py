"""A pipeline on virtual devices: a process per device runs the same kernels, under Triton's interpreter, at once.

Memory layout, prologue, epilogue, counters and queues are those of the GPU; the interpreter's atomics are real ones on
memory that all the processes share. The interpreter runs a kernel's programs one after another, so a producer and a
consumer that waits for it must be in different processes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import ClassVar

import torch

from tilerelay.errors import InvalidInput, TilerelayError
from tilerelay.graph.cut import CutWorkload
from tilerelay.kernels.config import KernelConfig
from tilerelay.kernels.protocol import ENDED
from tilerelay.protocol.layout import ProtocolLayout
from tilerelay.runtime.virtual_memory import PipelineMemory
from tilerelay.runtime.virtual_program import DeviceProgram
from tilerelay.runtime.virtual_workers import Reply, Workers
from tilerelay.runtime.workspace import Workspace

MOST_DEVICES = 32
LOOK_S = 0.25  # how often the parent looks whether the stages go on
GRACE_S = 30.0  # what a stage may take for a tile beside its waits before it counts as stuck


class VirtualPipeline:
    """See `tilerelay.Pipeline`, which checks the arguments.

    Args:
        stamps: keep timestamps of every tile (see `stamps`).
        workers: processes to use, one for each device, which stay when this object is closed; None: its own.

    Raises:
        TilerelayError: a worker did not start.
    """

    program: ClassVar[type[DeviceProgram]] = DeviceProgram

    def __init__(
        self,
        cut: CutWorkload,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
        layout: ProtocolLayout,
        configs: Sequence[KernelConfig],
        *,
        replicate: bool = False,
        timeout_us: int,
        hold_back: bool = False,
        first_epoch: int = 1,
        stamps: bool = True,
        workers: Workers | None = None,
    ) -> None:
        if hold_back:
            raise InvalidInput("hold_back holds a GPU stream back; virtual devices have none")
        self._cut, self._workload, self._layout = cut, cut.workload, layout
        self._weights, self._biases = weights, biases
        self._timeout_s, self._first_epoch = timeout_us * 1e-6, first_epoch
        if len(layout.devices) > MOST_DEVICES:
            raise InvalidInput(f"{len(layout.devices)} virtual devices: at most {MOST_DEVICES}, each is a process")
        self._broken: str | None = None
        self._memory = PipelineMemory(cut, layout, replicate=replicate, stamps=stamps)
        self.tensors = self._memory.tensors
        self.results = [self.tensors[place] for place in self._memory.plan.results()]
        self.workspace: Workspace = self._memory.workspace
        self._own_workers = workers is None
        self._workers = Workers(len(layout.devices)) if workers is None else workers
        try:
            if len(self._workers) < len(layout.devices):
                have, want = len(self._workers), len(layout.devices)
                raise InvalidInput(f"{have} workers for {want} virtual devices; start one for each")
            common = (cut, layout.signalling, configs, replicate)
            arguments = [(*common, device, timeout_us, stamps) for device in layout.devices]
            self._key = self._workers.make(self.program, arguments, self._memory.shared.fd)
            self.reset()
        except BaseException:
            self._free()
            raise

    @property
    def stamps(self) -> dict[int, torch.Tensor]:
        """By stage, int64 [tiles, EVENTS]: when tiles of the last run passed events, in ns of `time.monotonic_ns`."""
        return self.workspace.stamps

    def reset(self) -> None:
        """Protocol memory as before the first run. Nothing may be running."""
        self.workspace.reset(self._first_epoch)
        for stamps in self.stamps.values():
            stamps.zero_()
        self.epoch = self._first_epoch

    def run(self, x: Sequence[torch.Tensor]) -> None:
        """Run all stages at once; returns when all of them are done, or were ended by a deadline.

        In the second case the workspace's records say who waited for what, and the next run needs a `reset` first.

        Raises:
            TilerelayError: a stage failed (then the pipeline can be run again), or its process died or got stuck.
        """
        self._load(x[0])
        failures = self._ask("run", range(len(self._layout.devices)))
        self.epoch += 1
        if failures:
            self.reset()
            raise TilerelayError("\n".join(failures))

    def oracle(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Outputs [M, N] of all stages from the same kernels, layer by layer in one process; the next call's too.

        Raises:
            TilerelayError: the process failed, died or got stuck.
        """
        self._load(x)
        failures = self._ask("oracle", [0])
        if failures:
            raise TilerelayError("\n".join(failures))
        return self._memory.oracle_outputs

    def _load(self, x: torch.Tensor) -> None:
        """Copy the inputs to where the processes see them; the weights too, since they may be changed in place."""
        if self._broken:
            raise TilerelayError(f"this pipeline cannot be run any more; make a new one. {self._broken}")
        self._memory.x.copy_(x)
        shared, given = (*self._memory.weights, *self._memory.biases), (*self._weights, *self._biases)
        for ours, theirs in zip(shared, given, strict=True):
            if ours is not None and theirs is not None:
                ours.copy_(theirs)

    def _ask(self, method: str, workers: Sequence[int]) -> list[str]:
        """Have programs run a method; what went wrong, one text for every worker that failed."""
        for worker in workers:
            self._workers.call(worker, self._key, method)
        # A run shows its progress tile by tile; the oracle doesn't, so it gets the time of all its tiles.
        allowed_s = self._timeout_s + GRACE_S if method == "run" else GRACE_S * self._workload.tiles
        try:
            failed = self._wait(set(workers), allowed_s)
        except BaseException:  # interrupted: nobody knows what the processes are doing
            self._broken = "It was interrupted in a run."
            for worker in workers:
                self._workers.kill(worker)
            raise
        texts = [f"{self._name(reply.worker)}: {reply.error}" for reply in failed]
        if not all(self._workers.alive(worker) for worker in workers):
            self._broken = "\n".join(texts)
        return texts

    def _wait(self, waiting: set[int], allowed_s: float) -> list[Reply]:
        """Wait until all have answered; the failures. Ends the run when one fails, and whoever is stuck after that."""
        failed: list[Reply] = []
        progress, deadline = self._progress(), time.monotonic() + allowed_s
        while waiting:
            for reply in self._workers.wait(waiting, LOOK_S):
                waiting.discard(reply.worker)
                if reply.error:
                    failed.append(reply)
                    self._abort()
            before, progress = progress, self._progress()
            if progress != before:
                deadline = time.monotonic() + (GRACE_S if self._aborted() else allowed_s)
            elif time.monotonic() > deadline:
                if self._aborted():
                    for worker in waiting:
                        self._workers.kill(worker)
                    return failed + [Reply(worker, error="the process was stuck and was ended") for worker in waiting]
                self._abort()
                deadline = time.monotonic() + GRACE_S
        return failed

    def _words(self, name: str) -> list[int]:
        return [int(self.workspace.stage(stage, name)) for stage in range(len(self._workload.stages))]

    def _progress(self) -> list[int]:
        """Changes whenever a tile is done or an abort is raised."""
        return self._words("finished") + self._words("epoch") + self._words("abort")

    def _aborted(self) -> bool:
        return any(self._words("abort"))

    def _abort(self) -> None:
        """Release every stage from its waits (protocol rule 7)."""
        for stage in range(len(self._workload.stages)):
            self.workspace.stage(stage, "abort").fill_(ENDED.value)

    def _name(self, worker: int) -> str:
        device, device_of = self._layout.devices[worker], self._layout.placement.device_of
        stages = [
            f"stage {self._cut.origin[i][0]} ({s.name})"
            for i, s in enumerate(self._workload.stages)
            if device_of(i) == device
        ]
        return f"{', '.join(stages)} on virtual device {device}"

    def synchronize(self) -> None:
        """Nothing to do: `run` returns when all stages are done."""

    def close(self) -> None:
        """End this pipeline's processes and free its memory; tensors that the caller still holds stay valid."""
        try:
            if not self._own_workers:
                self._workers.drop(self._key, len(self._layout.devices))
        finally:
            self._free()

    def _free(self) -> None:
        if self._own_workers:
            self._workers.close()
        self._memory.shared.close()
        for name in ("tensors", "results", "workspace", "_memory", "_weights", "_biases"):
            setattr(self, name, None)
