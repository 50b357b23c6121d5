"""Stages, workload graphs, and the workloads that have a name."""

from __future__ import annotations

import numpy as np
import pytest

from tilerelay.errors import InvalidInput
from tilerelay.graph.catalog import MLP_SHAPES, dense_chain, gemm_chain, mlp
from tilerelay.graph.dependency import from_prerequisites, gemm_dependencies
from tilerelay.graph.tiling import TileGrid, grouped_order, row_panel_order
from tilerelay.graph.workload import L2_PANELS, Edge, Stage, Workload, chain, with_orders

GRID = TileGrid(200, 300, 128, 128)  # 2 x 3 tiles


def stage(name: str = "s", grid: TileGrid = GRID, k: int = 64, **options: object) -> Stage:
    return Stage(name, grid, k, **options)  # type: ignore[arg-type]


def test_a_stage_counts_its_work_and_keeps_its_order() -> None:
    assert stage().flops == 2 * 200 * 300 * 64
    assert stage().order is None
    assert stage(order=grouped_order(GRID, 2)).order.tolist() == [0, 3, 1, 4, 2, 5]
    assert stage(order=[5, 4, 3, 2, 1, 0]).order.dtype == np.int32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, "stage s: k=0: sizes must be positive"),
        ({"activation": "tanh"}, "unknown activation 'tanh'; choose one of none, relu, gelu, silu"),
        ({"order": [0, 1, 2]}, "name each of the grid's 6 tiles exactly once"),
        ({"order": [0, 0, 1, 2, 3, 4]}, "name each of the grid's 6 tiles exactly once"),
    ],
)
def test_a_stage_that_cannot_work_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        stage(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("grouped", [True, False])
def test_a_chain_hands_every_output_to_the_next_stage(grouped: bool) -> None:
    after = TileGrid(200, 64, 64, 64)
    workload = chain([stage("a"), stage("b", after, k=300), stage("c", GRID, k=64)], dtype="fp16", grouped=grouped)
    assert workload.is_chain and workload.dtype == "fp16"
    assert [(e.producer, e.consumer) for e in workload.edges] == [(0, 1), (1, 2)]
    assert workload.tiles == 6 + 4 + 6
    assert workload.flops == sum(s.flops for s in workload.stages)
    expected = gemm_dependencies(GRID, after, grouped=grouped)
    assert np.array_equal(workload.edges[0].dependencies.need, expected.need)
    assert workload.edges[0].dependencies.num_groups == 4  # 4 panels of one tile: grouped or not


def test_panels_in_flight_together_are_walked_column_by_column() -> None:
    grid, own = TileGrid(512, 384, 128, 128), np.arange(12)[::-1]  # 4 x 3 tiles
    workload = chain([stage("a", grid, k=384), stage("b", grid, k=384), stage("c", grid, k=384, order=own)])
    orders = [s.order for s in with_orders(workload, [8, 2, 12]).stages]
    assert np.array_equal(orders[0], grouped_order(grid, 2))  # 8 tiles are two whole panels
    assert np.array_equal(orders[1], row_panel_order(grid))  # not even one: the first panel first
    assert np.array_equal(orders[2], own), "an order that was asked for stays"


@pytest.mark.parametrize(("block_n", "panels"), [(256, L2_PANELS), (128, L2_PANELS // 2), (16, 1)])
def test_a_stage_alone_walks_for_the_cache(block_n: int, panels: int) -> None:
    grid = TileGrid(2048, 3 * block_n, 128, block_n)
    (alone,) = with_orders(chain([stage("a", grid)]), [3]).stages
    assert np.array_equal(alone.order, grouped_order(grid, panels))


def test_a_graph_that_branches_is_no_chain() -> None:
    edges = (Edge(0, 1, gemm_dependencies(GRID, GRID)), Edge(0, 2, gemm_dependencies(GRID, GRID)))
    assert not Workload((stage("a"), stage("b"), stage("c")), edges).is_chain


def test_stages_that_do_not_meet_are_refused() -> None:
    with pytest.raises(InvalidInput, match="b reads k=64 columns, a makes n=300; make both equal"):
        chain([stage("a"), stage("b")])
    with pytest.raises(InvalidInput, match="makes 200 rows, the consumer reads 201: give both the same m"):
        chain([stage("a"), stage("b", TileGrid(201, 64, 128, 128), k=300)])


@pytest.mark.parametrize(("producer", "consumer"), [(1, 0), (0, 0), (0, 2), (-1, 0)])
def test_an_edge_against_the_order_of_stages_is_refused(producer: int, consumer: int) -> None:
    edge = Edge(producer, consumer, gemm_dependencies(GRID, GRID))
    with pytest.raises(InvalidInput, match="list the stages so that producers come before consumers"):
        Workload((stage("a"), stage("b")), (edge,))


@pytest.mark.parametrize("dependencies", [from_prerequisites(5, [[0]] * 6), from_prerequisites(6, [[0]] * 5)])
def test_dependencies_of_other_grids_are_refused(dependencies: object) -> None:
    with pytest.raises(InvalidInput, match="do not match the stages' 6 -> 6 tiles; build them from the stages' grids"):
        Workload((stage("a"), stage("b")), (Edge(0, 1, dependencies),))  # type: ignore[arg-type]


def test_no_stage_and_an_unknown_dtype_are_refused() -> None:
    with pytest.raises(InvalidInput, match="no stage; give at least one"):
        Workload((), ())
    with pytest.raises(InvalidInput, match="unknown dtype 'fp64'; choose one of bf16, fp16"):
        Workload((stage(),), (), dtype="fp64")


def test_a_dense_chain_activates_every_layer_but_the_last() -> None:
    workload = dense_chain(100, [32, 64, 96, 16], tile=(64, 32), activation="gelu", bias=True)
    assert [(s.k, s.grid.n) for s in workload.stages] == [(32, 64), (64, 96), (96, 16)]
    assert [s.activation for s in workload.stages] == ["gelu", "gelu", "none"]
    assert all(s.bias and s.grid.m == 100 for s in workload.stages)


def test_the_papers_chain_and_the_mlps() -> None:
    assert [(s.grid.m, s.k, s.grid.n) for s in gemm_chain(3, 256, 512, 128).stages] == [
        (256, 128, 512),
        (256, 512, 512),
        (256, 512, 512),
    ]
    for model, (hidden, intermediate) in MLP_SHAPES.items():
        up, down = mlp(model, 128).stages
        assert (up.k, up.grid.n, down.k, down.grid.n) == (hidden, intermediate, intermediate, hidden)


def test_a_chain_without_layers_and_an_unknown_model_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"widths=\[64\]: give at least two, the input's and the output's"):
        dense_chain(8, [64])
    with pytest.raises(InvalidInput, match="unknown model 'nobody'; choose one of paper, gpt3-175b"):
        mlp("nobody", 8)


@pytest.mark.parametrize("under_way", [0, -3])
def test_turns_of_no_tile_are_refused(under_way: int) -> None:
    with pytest.raises(InvalidInput, match=f"under_way={under_way}: at least one tile"):
        Stage("a", GRID, 64, under_way=under_way)
