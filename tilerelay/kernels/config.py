"""Which GEMM computes a stage, with which blocks and buffers; sized to the device's shared memory."""

from __future__ import annotations

from dataclasses import dataclass

from tilerelay.errors import InvalidInput

KERNELS = ("persistent", "classical")
BLOCK_K = 64  # elements: a 128-byte swizzled row of 16-bit values
HOPPER_SHARED_BYTES = 227 * 1024
# Segments of one kernel at most: its roles are handed what they know of each through shared memory.
MOST_SEGMENTS = 6
_OTHER_BYTES = 2560  # of that, with eight copies of each output, and mbarriers, scratch and alignment
_MAX_BUFFERS = 8
_MAX_CLASSICAL_BUFFERS = 5  # a sixth no longer helped (measured on an H200, M = 2048 and 8192)
DEFAULT_TILE = {"persistent": (128, 256), "classical": (128, 128)}


@dataclass(frozen=True)
class KernelConfig:
    """Block shape [block_m, block_n, block_k] and buffering of one stage's kernel.

    Attributes:
        num_buffers: A and B blocks in flight.
        store_buffers: output blocks in flight (persistent only).
        store_n: columns of one bulk store; block_n or half of it (persistent only).
        num_warps: of a classical CTA, or of one of a persistent CTA's warpgroups.
        warpgroups: that share the rows of a block, each with its own accumulators (persistent only).
    """

    kind: str
    block_m: int
    block_n: int
    block_k: int
    num_buffers: int
    store_buffers: int
    store_n: int
    num_warps: int
    warpgroups: int

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA, an upper bound for all numbers of segments and copies."""
        return self.shared_bytes_at_least + _OTHER_BYTES

    @property
    def shared_bytes_at_least(self) -> int:
        """Shared memory of a CTA's buffers."""
        loads = self.num_buffers * (self.block_m + self.block_n) * self.block_k * 2
        stores = self.store_buffers * self.block_m * self.store_n * 2 if self.kind == "persistent" else 0
        return loads + stores


def configure(
    kind: str, tile: tuple[int, int], shared_limit: int = HOPPER_SHARED_BYTES, *, whole_tile: bool = False
) -> KernelConfig:
    """The kernel for a tile shape, with as many buffers as shared memory holds.

    Args:
        kind: "persistent" (warp-specialised, one CTA per SM) or "classical" (a CTA per tile).
        tile: (block_m, block_n); 64, 128 or 256 rows, 32 to 256 columns, powers of two.
        shared_limit: bytes of shared memory that a CTA may have.
        whole_tile: output blocks for a whole tile, so that the next one is computed while it waits for its turn.

    Raises:
        InvalidInput: unknown kind, a tile shape without a kernel, or one that does not fit shared memory.
    """
    if kind not in KERNELS:
        raise InvalidInput(f"unknown kernel {kind!r}; choose one of {', '.join(KERNELS)}")
    block_m, block_n = tile
    if block_m not in (64, 128, 256) or block_n not in (32, 64, 128, 256):
        raise InvalidInput(
            f"no kernel for tile {block_m}x{block_n}; rows must be 64, 128 or 256, columns 32, 64, 128 or 256"
        )
    store_n = block_n // 2 if block_m * block_n >= 128 * 256 else block_n
    # A warpgroup per 128 x 128 accumulators in the classical kernel, where more of them only wait.
    num_warps = 4 if kind == "persistent" or block_m * block_n <= 128 * 128 else 8
    warpgroups = 2 if kind == "persistent" and block_m >= 128 else 1
    store_buffers = block_n // store_n if whole_tile else 1
    most = _MAX_BUFFERS if kind == "persistent" else _MAX_CLASSICAL_BUFFERS
    for num_buffers in range(most, 1, -1):
        config = KernelConfig(
            kind, block_m, block_n, BLOCK_K, num_buffers, store_buffers, store_n, num_warps, warpgroups
        )
        if config.shared_bytes <= shared_limit and block_m * block_n <= 128 * 256:
            return config
    raise InvalidInput(
        f"tile {block_m}x{block_n} does not fit: a CTA has {shared_limit // 1024} KiB of shared memory and "
        f"128 x 256 fp32 accumulators; use tile=(128, 256) or smaller"
    )
