"""A tile's way to other devices: bulk stores, or a relay from its own device's memory, a little at a time.

Bulk stores are the faster way for a tile, but go at once: when all SMs of a wave end their tiles together they fill the
way to NVLink, and the loads of every SM's next tile wait behind them (docs/notes.md). Loads and stores of a kilobyte
leave room for those, and hide under the next tile's products.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilerelay.kernels.sync import barrier, bulk_stores_complete

# How a tile gets to the other devices that keep it.
BULK = gl.constexpr(0)  # by bulk stores, as to its own
RELAY = gl.constexpr(1)
RELAY_BUT_LAST = gl.constexpr(2)  # but a CTA's last tile of the stage, which somebody waits for, by bulk stores
IN_TURN = gl.constexpr(3)  # by bulk stores, when it is the tile's turn (protocol.await_turn)

RELAYS = (RELAY.value, RELAY_BUT_LAST.value)

AT_ONCE = gl.constexpr(1024)  # bytes that a warp loads before it stores them
WORD = gl.constexpr(4)  # elements of 16 bits that are copied as one


class Relay(NamedTuple):
    """Where tiles are relayed from, and to: the same columns of tensors of the same width."""

    own: Any  # [m, n]
    peers: Any  # int64 [copies - 1]: addresses of the others


@gluon.jit
def relay_tile(c_desc, relay, row, col, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, PEERS: gl.constexpr):
    """Copy a tile to every peer. What the epilogue does next orders these stores (rules 2 and 3).

    Precondition: called by all threads of the role, of one warp, that issued the tile's bulk stores to `c_desc`.
    """
    WORDS: gl.constexpr = BLOCK_N // WORD
    ROWS: gl.constexpr = AT_ONCE // (2 * BLOCK_N)
    LANES: gl.constexpr = min(WORDS, 32)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [32 // LANES, LANES], [1, 1], [1, 0])
    bulk_stores_complete()  # as for publishing (rules 1 and 2): the warp reads what one of its threads has stored
    barrier()
    height = gl.minimum(c_desc.shape[0] - row, BLOCK_M)
    width = (c_desc.shape[1] - col) // WORD
    stride = (c_desc.strides[0] // WORD).to(gl.int32)
    rows = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)), 1)
    words = gl.expand_dims(gl.arange(0, WORDS, gl.SliceLayout(0, LAYOUT)), 0)
    own = relay.own.to(gl.pointer_type(gl.int64), bitcast=True)
    start = row.to(gl.int64) * stride + col // WORD
    within = rows * stride + words
    for done in range(0, height, ROWS):
        inside = (rows < height - done) & (words < width)
        values = gl.load(own + start + within, mask=inside, cache_modifier=".cg")  # past L1, as the bulk stores were
        for peer in gl.static_range(PEERS):
            address = gl.load(relay.peers + peer).to(gl.pointer_type(gl.int64))
            gl.store(address + start + within, values, mask=inside)
        start += ROWS * stride
