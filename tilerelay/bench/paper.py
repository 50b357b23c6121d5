"""The paper's numbers (arXiv:2607.07862; B200 GPUs, bf16, weights 8192 x 8192), to put beside what is measured here."""

from __future__ import annotations

from tilerelay.baselines.cell import Cell

WIDTH = 8192

# Table I, M = 16384: GPUs = layers -> (tensor parallelism us, CTA-pipelining us, reduction).
TABLE_1_M = 16384
TABLE_1: dict[int, tuple[float, float, float | None]] = {
    1: (1080.0, 1080.0, None),
    2: (1640.0, 1165.0, 0.290),
    4: (2636.0, 1418.0, 0.462),
    8: (4493.0, 1844.0, 0.590),
}

# Figure 4, M = 16384: GPUs = layers -> reduction against micro-batching with its best chunk size.
FIGURE_4_M = 16384
FIGURE_4 = {2: 0.318, 4: 0.300, 8: 0.234}

# Figure 5, two layers on two GPUs: M -> reduction against micro-batching (best chunk size), against tensor parallelism.
FIGURE_5 = {
    1024: (0.013, 0.019),
    2048: (0.091, 0.063),
    4096: (0.183, 0.239),
    8192: (0.263, 0.251),
    16384: (0.318, 0.290),
    32768: (0.227, 0.296),
}

# Figure 7, two layers: its text gives no numbers.
FIGURE_7_M = (4096, 8192, 16384)
FIGURE_7_GPUS = (2, 4, 8)


def paper_us(cell: Cell, method: str) -> float | None:
    """The paper's latency of a method on this cell, on its own machine."""
    if (cell.n, cell.k, cell.m) != (WIDTH, WIDTH, TABLE_1_M) or cell.layers != cell.gpus:
        return None
    row = TABLE_1.get(cell.gpus)
    if row is None:
        return None
    # On one GPU nothing is parallel: the paper's first column is plain cuBLAS there.
    first = "tp-nccl" if cell.gpus > 1 else "sequential"
    return {first: row[0], "pipelined": row[1]}.get(method)


def paper_reduction(cell: Cell, method: str) -> float | None:
    """The paper's latency reduction of CTA-pipelining against this method on this cell (0.25: a quarter less)."""
    if (cell.n, cell.k) != (WIDTH, WIDTH) or cell.layers != cell.gpus:
        return None
    if method == "microbatch-direct":
        if cell.gpus == 2 and cell.m in FIGURE_5:
            return FIGURE_5[cell.m][0]
        return FIGURE_4.get(cell.gpus) if cell.m == FIGURE_4_M else None
    if method == "tp-nccl":
        if cell.gpus == 2 and cell.m in FIGURE_5:
            return FIGURE_5[cell.m][1]
        return TABLE_1[cell.gpus][2] if cell.m == TABLE_1_M and cell.gpus in TABLE_1 else None
    return None
