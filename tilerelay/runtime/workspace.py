"""Protocol memory of one pipeline: one buffer per device, seen as what the kernels' hooks are handed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from tilerelay.kernels.protocol import Control, Handover, Inbox, Outbox, Segment
from tilerelay.kernels.relay import Relay
from tilerelay.protocol.layout import RECORD_WORDS, Field, ProtocolLayout

_TORCH = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64, np.dtype(np.float32): torch.float32}


class Workspace:
    """Buffers laid out by `ProtocolLayout`, typed views of them, and the host-visible error records.

    Args:
        buffers: uint8 tensors of `layout.size(device)` bytes, by device.
        records: int32 [stages, RECORD_WORDS], host memory that every device can write.
        on_device: makes a copy of a host tensor where the stage of this device can read it.
    """

    def __init__(
        self,
        layout: ProtocolLayout,
        buffers: dict[int, torch.Tensor],
        records: torch.Tensor,
        on_device: Callable[[torch.Tensor, int], torch.Tensor],
    ) -> None:
        self.layout = layout
        self.records = records
        self._raised = records.numpy()[:, 0]
        self._buffers = buffers
        words = [
            self.stage(s, name).data_ptr() for s in range(len(layout.workload.stages)) for name in ("abort", "wake")
        ]
        self.stamps: dict[int, torch.Tensor] = {}
        self.abort_words = {
            device: on_device(torch.tensor(words, dtype=torch.int64), device) for device in layout.devices
        }

    def view(self, field: Field) -> torch.Tensor:
        """The field's memory, typed."""
        return self._buffers[field.device][field.offset : field.offset + field.nbytes].view(_TORCH[field.dtype])

    def stage(self, stage: int, name: str) -> torch.Tensor:
        return self.view(self.layout.stage_field(stage, name))

    def edge(self, edge: int, name: str) -> torch.Tensor:
        return self.view(self.layout.edge_field(edge, name))

    def reset(self, epoch: int = 1) -> None:
        """Put all protocol memory into its state before the run of `epoch`. Nothing may be running."""
        for device, buffer in self._buffers.items():
            image = self.layout.image(device, epoch)
            buffer[: len(image)].copy_(torch.from_numpy(image))
        self.records.zero_()

    @property
    def aborted(self) -> bool:
        """Some stage has given up; a look costs a microsecond."""
        return bool(self._raised.any())

    def segment(
        self,
        stage: int,
        in_edges: Sequence[int],
        out_edges: Sequence[int],
        bias: torch.Tensor | None,
        relay: Relay | None = None,
    ) -> Segment:
        """What the kernel is handed of the protocol for a stage: one inbox to poll, an outbox for each reader."""
        inbox = self._inbox(in_edges[0]) if in_edges else self._no_inbox(stage)
        outboxes = tuple(self._outbox(edge) for edge in out_edges)
        return Segment(self._control(stage), inbox, outboxes, bias, self._handover(stage), relay)

    def _handover(self, stage: int) -> Handover | None:
        if self.layout.workload.stages[stage].walk is None:
            return None
        return Handover(*(self.stage(stage, name) for name in Handover._fields))

    def _control(self, stage: int) -> Control:
        names = ("numbers", "epoch", "finished", "order", "sent", "published", "abort")
        return Control(
            **{name: self.stage(stage, name) for name in names},
            abort_words=self.abort_words[self.layout.placement.device_of(stage)],
            record=self.records[stage],
            stamps=self.stamps.get(stage),
        )

    def _inbox(self, edge: int) -> Inbox:
        names = ("ring", "scoreboard", "group_of", "steps")
        return Inbox(**{name: self.edge(edge, name) for name in names}, need=self.edge(edge, "consumer_need"))

    def _no_inbox(self, stage: int) -> Inbox:
        """For a first stage: pointers of the right types that its kernel does not use."""
        word, pair = self.stage(stage, "epoch"), self.abort_words[self.layout.placement.device_of(stage)]
        return Inbox(ring=pair, scoreboard=word, group_of=word, need=word, steps=word)

    def _outbox(self, edge: int) -> Outbox:
        names = ("offsets", "counters", "need", "member_offsets", "members", "scoreboard", "tail", "ring")
        consumer = self.layout.workload.edges[edge].consumer
        return Outbox(**{name: self.edge(edge, name) for name in names}, wake=self.stage(consumer, "wake"))


def new_records(stages: int, device_type: str) -> torch.Tensor:
    """Zeroed error records, int32 [stages, RECORD_WORDS], on the host; GPUs write them, too."""
    return torch.zeros(stages, RECORD_WORDS, dtype=torch.int32, pin_memory=device_type == "cuda")
