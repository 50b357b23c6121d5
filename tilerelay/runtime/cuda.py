"""GPUs: what the machine can run, peer memory that really works, and the launch of all stages at once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import permutations
from typing import Any

import torch
import triton
import triton.language as tl

from tilerelay.errors import UnsupportedMachine
from tilerelay.kernels.sync import INTERPRETED

PATTERN_WORDS = 1024


def check_machine(devices: Sequence[int]) -> dict[int, int]:
    """SMs of each device, after checking that all of them can run the kernels at once.

    Raises:
        UnsupportedMachine: no GPU, an unknown device, another architecture, or launches made to wait for each other.
    """
    if not torch.cuda.is_available():
        raise UnsupportedMachine("no GPU is visible to torch; use backend='cpu' to run on virtual devices")
    if INTERPRETED:
        raise UnsupportedMachine("TRITON_INTERPRET is set: kernels would be interpreted; unset it before the import")
    if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        raise UnsupportedMachine("CUDA_LAUNCH_BLOCKING is set: stages that wait for each other would hang; unset it")
    count = torch.cuda.device_count()
    for device in devices:
        if device >= count:
            raise UnsupportedMachine(f"device {device} does not exist; this machine has {count} (0 to {count - 1})")
        capability = torch.cuda.get_device_capability(device)
        if capability != (9, 0):
            raise UnsupportedMachine(
                f"device {device} has compute capability {capability[0]}.{capability[1]}; the kernels need 9.0 (Hopper)"
            )
    return {d: torch.cuda.get_device_properties(d).multi_processor_count for d in devices}


def shared_memory_limit(device: int) -> int:
    """Bytes of shared memory that one CTA can have on a device."""
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


@triton.jit  # type: ignore[untyped-decorator]
def _write_pattern(out, first, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    ids = tl.arange(0, COUNT)
    tl.store(out + ids, first + ids)


def open_peers(devices: Sequence[int]) -> None:
    """Let every device write every other one's memory, and prove it: write a pattern there and read it back.

    Raises:
        UnsupportedMachine: two devices cannot reach each other, or a write was lost.
    """
    for source, target in permutations(devices, 2):
        _open_way(source, target)


@cache
def _open_way(source: int, target: int) -> None:
    if not torch.cuda.can_device_access_peer(source, target):
        raise UnsupportedMachine(
            f"device {source} cannot write the memory of device {target}; pick devices joined by NVLink"
        )
    torch.ones(1, device=f"cuda:{source}").to(f"cuda:{target}")  # makes torch open the way
    memory = torch.zeros(PATTERN_WORDS, dtype=torch.int32, device=f"cuda:{target}")
    torch.cuda.synchronize(target)
    first = 1 + source * 65536 + target
    with torch.cuda.device(source):
        _write_pattern[(1,)](memory, first, PATTERN_WORDS)
        torch.cuda.synchronize(source)
    expected = torch.arange(first, first + PATTERN_WORDS, dtype=torch.int32)
    if not torch.equal(memory.cpu(), expected):
        raise UnsupportedMachine(
            f"device {source} can open the memory of device {target}, but what it wrote did not arrive; "
            f"check the driver, IOMMU and virtualisation settings"
        )


@contextmanager
def on(stream: torch.cuda.Stream) -> Iterator[None]:
    """The stream, and its device, as the current ones."""
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield


class Fork:
    """The caller's stream forks into one per stage and joins them again; no event is made while a run is under way."""

    def __init__(self, streams: Sequence[torch.cuda.Stream], home: int) -> None:
        self.streams = streams
        self._begin = self._event(home)
        self._ends = [self._event(stream.device_index) for stream in streams]

    @staticmethod
    def _event(device: int) -> torch.cuda.Event:
        with torch.cuda.device(device):
            event = torch.cuda.Event()
            event.record()  # torch makes the event at its first use
            return event

    def fork(self, caller: torch.cuda.Stream) -> None:
        self._begin.record(caller)
        for stream in self.streams:
            stream.wait_event(self._begin)

    def join(self, caller: torch.cuda.Stream) -> None:
        """All stages of the run are done before anything that the caller enqueues next (rule 9)."""
        for stream, end in zip(self.streams, self._ends, strict=True):
            end.record(stream)
            caller.wait_event(end)


def hold_back(stream: torch.cuda.Stream, word: torch.Tensor, epoch: int) -> None:
    """Hold a consumer's stream until its wake word says `epoch`: its first queue entry has come (paper, III.A.5).

    Raises:
        UnsupportedMachine: the driver refused.
    """
    from cuda.bindings import driver

    flag = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
    (error,) = driver.cuStreamWaitValue32(stream.cuda_stream, word.data_ptr(), epoch & 0xFFFFFFFF, flag)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise UnsupportedMachine(f"cuStreamWaitValue32 failed ({error.name}); use hold_back=False")
