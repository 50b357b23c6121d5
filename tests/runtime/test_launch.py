"""The size of a persistent grid."""

from hypothesis import given
from hypothesis import strategies as st

from tilerelay.runtime.launch import balanced_grid


@given(st.integers(1, 10_000), st.integers(1, 256))
def test_as_few_ctas_as_finish_in_the_same_waves(tiles: int, sms: int) -> None:
    grid = balanced_grid(tiles, sms)
    waves = -(-tiles // sms)
    assert 1 <= grid <= min(tiles, sms)
    assert -(-tiles // grid) == waves
    assert grid == 1 or -(-tiles // (grid - 1)) > waves
