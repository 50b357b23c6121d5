"""A word that two devices send each other, stamped with their clocks: how far apart are these (runtime.clocks)?

Both kernels run at once, a program each. Every wait is bounded by its number of polls; who has given up once does not
wait any more, so both end whatever the other does.
"""

import triton
import triton.language as tl

from tilerelay.kernels.sync import clock_ns, load_acquire


@triton.jit
def _wait(word, want, alive, POLLS: tl.constexpr):
    """Poll this device's own memory until the word is there; False when it is not, now or at an earlier wait."""
    behind = load_acquire(word) < want
    polls = 0
    while behind & alive:
        behind = load_acquire(word) < want
        polls += 1
        alive = polls < POLLS
    return not behind


@triton.jit
def ping(mine, theirs, sent, answered, EXCHANGES: tl.constexpr, POLLS: tl.constexpr):
    """The side that begins: int64 [EXCHANGES] `sent` and `answered`, the latter 0 where no answer came."""
    alive = mine is not None
    for i in range(EXCHANGES):
        before = clock_ns()
        tl.atomic_xchg(theirs, i + 1, sem="release", scope="sys")
        alive = _wait(mine, i + 1, alive, POLLS)
        after = clock_ns()
        tl.store(sent + i, before)
        tl.store(answered + i, tl.where(alive, after, 0))


@triton.jit
def pong(mine, theirs, arrived, EXCHANGES: tl.constexpr, POLLS: tl.constexpr):
    """The side that answers: int64 [EXCHANGES] `arrived`, 0 where no word came."""
    alive = mine is not None
    for i in range(EXCHANGES):
        alive = _wait(mine, i + 1, alive, POLLS)
        now = clock_ns()
        tl.atomic_xchg(theirs, i + 1, sem="release", scope="sys")
        tl.store(arrived + i, tl.where(alive, now, 0))
