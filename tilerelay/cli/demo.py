"""`tilerelay demo`: a three-stage chain on virtual devices, checked, with a timeline in the terminal."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from tilerelay.cli.timeline import draw
from tilerelay.graph.catalog import gemm_chain
from tilerelay.graph.placement import pipelined

STAGES, ROWS, WIDTH, TILE = 3, 384, 128, (64, 64)


def demo(seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="seed of the random data")] = 0) -> None:
    """Run three dependent GEMMs on three virtual devices at once and compare them with the layer-by-layer result."""
    import torch

    from tilerelay.runtime.pipeline import Pipeline
    from tilerelay.runtime.tracing import trace_of

    say = Console().print
    torch.manual_seed(seed)
    workload = gemm_chain(STAGES, ROWS, WIDTH, WIDTH, tile=TILE)
    weights = [(torch.randn(WIDTH, WIDTH) / WIDTH**0.5).bfloat16() for _ in range(STAGES)]
    x = torch.randn(ROWS, WIDTH).bfloat16()
    say(f"{STAGES} GEMMs [{ROWS} x {WIDTH}] x [{WIDTH} x {WIDTH}] in bf16: {workload.tiles} tiles of 64 x 64")
    say(f"starting {STAGES} virtual devices (a process each, the GPU's kernel under Triton's interpreter) ...")
    with Pipeline(workload, weights, placement=pipelined(range(STAGES)), backend="cpu", trace=True) as pipe:
        pipe(x)
        expected = pipe.oracle(x)[-1]
        say(draw(trace_of(pipe)))
        equal = torch.equal(pipe.y, expected)
        say(f"bit-equal to the layer-by-layer result: {'yes' if equal else 'NO'}")
    if not equal:
        raise typer.Exit(1)
