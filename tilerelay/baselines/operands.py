"""X, weights and buffers of one chain: made once for the largest batch, shared by all methods and batch sizes.

Everything is random normal: zeros draw less power, let the clock rise and flatter every method.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import torch


class Operands:
    """Tensors on every GPU, made at first use and kept, so that graphs may point at them.

    Args:
        devices: GPU -> its device. One process: all of them. torchrun: this rank's alone; ranks make equal values.
        widths: columns of x and of every layer's output.
        rows: the largest batch; methods use the first m rows.
    """

    def __init__(
        self,
        devices: Mapping[int, torch.device],
        widths: Sequence[int],
        rows: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        seed: int = 0,
    ) -> None:
        self.devices, self.widths, self.rows, self.dtype = dict(devices), tuple(widths), rows, dtype
        self._seed = seed
        self._kept: dict[tuple[object, ...], torch.Tensor] = {}

    def x(self, gpu: int) -> torch.Tensor:
        """[rows, K]; the same values on every GPU."""
        return self.filled(gpu, self.widths[0])

    def filled(self, gpu: int, width: int) -> torch.Tensor:
        """[rows, width] of random normal numbers that nobody writes to; the same values on every GPU."""
        return self._random(f"x{width}", gpu, (self.rows, width), 1.0)

    def weight(self, layer: int, gpu: int) -> torch.Tensor:
        """[N, K] of a layer; scaled so that outputs stay near one."""
        k, n = self.widths[layer], self.widths[layer + 1]
        return self._random(f"w{layer}", gpu, (n, k), k**-0.5)

    def column_shard(self, layer: int, gpu: int, part: int, parts: int) -> torch.Tensor:
        """[N / parts, K]: the weight's part that makes a part of the output columns (Megatron's column-parallel A)."""
        weight = self.weight(layer, gpu)
        size = weight.shape[0] // parts
        return weight[part * size : (part + 1) * size]

    def row_shard(self, layer: int, gpu: int, part: int, parts: int) -> torch.Tensor:
        """[N, K / parts], contiguous: the weight's part that reads a part of the input columns (row-parallel B)."""
        key = ("row shard", layer, gpu, part, parts)
        if key not in self._kept:
            weight = self.weight(layer, gpu)
            size = weight.shape[1] // parts
            self._kept[key] = weight[:, part * size : (part + 1) * size].contiguous()
        return self._kept[key]

    def buffer(self, name: str, gpu: int, width: int, rows: int | None = None) -> torch.Tensor:
        """[rows, width] scratch. Methods share it by name: they never run at the same time."""
        rows = self.rows if rows is None else rows
        key = ("buffer", name, gpu, width, rows)
        if key not in self._kept:
            self._kept[key] = torch.empty(rows, width, dtype=self.dtype, device=self.devices[gpu])
        return self._kept[key]

    def _random(self, name: str, gpu: int, shape: tuple[int, int], scale: float) -> torch.Tensor:
        key = (name, gpu)
        if key not in self._kept:
            home = next(iter(self.devices))
            if gpu == home:
                device = self.devices[gpu]
                generator = torch.Generator(device=device)
                generator.manual_seed(self._seed + zlib.crc32(name.encode()))
                values = torch.randn(shape, dtype=self.dtype, device=device, generator=generator)
                self._kept[key] = values.mul_(scale)
            else:
                self._kept[key] = self._random(name, home, shape, scale).to(self.devices[gpu], copy=True)
        return self._kept[key]
