"""The size of a persistent grid."""

from hypothesis import given
from hypothesis import strategies as st

from tilerelay.runtime.launch import balanced_grid


def waves(tiles: list[int], ctas: int) -> list[int]:
    return [-(-count // ctas) for count in tiles]


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=4), st.integers(1, 256))
def test_as_few_ctas_as_finish_in_the_same_waves(tiles: list[int], sms: int) -> None:
    grid = balanced_grid(tiles, sms)
    assert 1 <= grid <= min(max(tiles), sms)
    assert waves(tiles, grid) == waves(tiles, sms)
    assert grid == 1 or waves(tiles, grid - 1) != waves(tiles, sms)


def test_a_short_segment_is_not_stretched_for_a_long_one() -> None:
    """448 short tiles and 128 long ones on 132 SMs: 116 CTAs would do for all 576, but give some two long tiles."""
    assert balanced_grid([448, 128], 132) == 128
