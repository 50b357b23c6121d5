"""The methods by name: which process set measures them, and how they are made. Imports torch only to make them."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tilerelay.errors import InvalidInput

if TYPE_CHECKING:
    from tilerelay.baselines.method import Method, RankMethod

FLOOR = "floor"
OURS = "pipelined"
ONE_PROCESS = "one-process"
TORCHRUN = "torchrun"

# Every process set measures the floor in its own rounds: only ratios to it can be compared across sets.
PROCESS_SETS: dict[str, tuple[str, ...]] = {
    ONE_PROCESS: (
        FLOOR,
        "sequential",
        "sequential-copy",
        "microbatch-direct",
        "microbatch-copy",
        "tp-nccl",
        "tp-nccl-chunked",
        "weight-streaming",
        OURS,
        "sharded",
        "sharded-replicated",
        "hybrid-tp",
    ),
    TORCHRUN: (FLOOR, "tp-nccl", "tp-two-shot", "async-tp", "async-tp-gathered"),
}
NAMES = (
    *PROCESS_SETS[ONE_PROCESS][:7],
    *PROCESS_SETS[TORCHRUN][2:],
    *PROCESS_SETS[ONE_PROCESS][7:],
)


def choose(names: Sequence[str]) -> dict[str, list[str]]:
    """Methods to measure by process set; none named: all that can run. The floor is always among them.

    Raises:
        InvalidInput: an unknown method.
    """
    for name in names:
        if name not in NAMES:
            raise InvalidInput(f"unknown method {name!r}; choose from {', '.join(NAMES)}")
    wanted = set(names or NAMES) | {FLOOR}
    chosen = {ONE_PROCESS: [n for n in PROCESS_SETS[ONE_PROCESS] if n in wanted]}
    # tp-nccl and the floor alone need no second set.
    if wanted & set(PROCESS_SETS[TORCHRUN][2:]):
        chosen[TORCHRUN] = [n for n in PROCESS_SETS[TORCHRUN] if n in wanted]
    if names and chosen[ONE_PROCESS] == [FLOOR] and TORCHRUN in chosen:
        del chosen[ONE_PROCESS]
    return chosen


# Where a method lives. Each is imported on its own: one that cannot be imported fails alone.
_HOMES = {
    FLOOR: "tilerelay.baselines.floor:Floor",
    "sequential": "tilerelay.baselines.sequential:Sequential",
    "sequential-copy": "tilerelay.baselines.sequential:SequentialCopy",
    "microbatch-direct": "tilerelay.baselines.micro_batch:MicroBatchDirect",
    "microbatch-copy": "tilerelay.baselines.micro_batch:MicroBatchCopy",
    "tp-nccl": "tilerelay.baselines.tensor_parallel:TensorParallel",
    "tp-nccl-chunked": "tilerelay.baselines.tensor_parallel:TensorParallelChunked",
    "weight-streaming": "tilerelay.baselines.weight_streaming:WeightStreaming",
    OURS: "tilerelay.bench.own:Pipelined",
    "sharded": "tilerelay.bench.own:Sharded",
    "sharded-replicated": "tilerelay.bench.own:ShardedReplicated",
    "hybrid-tp": "tilerelay.baselines.hybrid_tp:HybridTensorParallel",
}
_RANK_HOMES = {
    FLOOR: "tilerelay.baselines.rank_methods:RankFloor",
    "tp-nccl": "tilerelay.baselines.rank_methods:RankTensorParallel",
    "tp-two-shot": "tilerelay.baselines.rank_methods:RankTwoShot",
    "async-tp": "tilerelay.baselines.rank_methods:RankAsyncTensorParallel",
    "async-tp-gathered": "tilerelay.baselines.rank_methods:RankAsyncTensorParallelGathered",
}


def make(name: str) -> Method:
    """A method of the one-process set."""
    return _load(_HOMES[name])  # type: ignore[no-any-return]


def make_rank(name: str) -> RankMethod:
    """A method of the torchrun set."""
    return _load(_RANK_HOMES[name])  # type: ignore[no-any-return]


def _load(home: str) -> Any:
    module, _, class_name = home.partition(":")
    return getattr(importlib.import_module(module), class_name)()
