"""Which units of KV a program of the streamed decode kernel reads, and in which order.

Teams take equal shares of all sequences' units laid end to end, as in
`pdserve.kernels.decode_shares`; a unit is what one copy brings. A place is a sequence, a unit in
it, its number of units, length and origin (the first token that any query sees, rounded down to a
unit), and what is left of the share. A tile is the next few units of one sequence.

Letters as in `pdserve.kernels.decode_attention`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def measure(lengths, T: gl.constexpr, UNIT: gl.constexpr, WINDOW: gl.constexpr):
    """Returns where the oldest query's reach begins, rounded down, and how many units follow."""
    if WINDOW is None:
        origin = lengths * 0
    else:
        origin = gl.maximum(lengths - (T - 1) - WINDOW, 0) // UNIT * UNIT
    return origin, gl.cdiv(lengths - origin, UNIT)


@gluon.jit
def advance(
    sequence,
    unit,
    units,
    length,
    origin,
    left,
    count,
    lengths_ptr,
    T: gl.constexpr,
    UNIT: gl.constexpr,
    WINDOW: gl.constexpr,
):
    """Goes on by `count` units, to the next sequence that has any if this one is at its end."""
    unit += count
    left -= count
    if (unit == units) & (left > 0):
        sequence += 1
        length = gl.load(lengths_ptr + sequence)
        while length == 0:
            sequence += 1
            length = gl.load(lengths_ptr + sequence)
        unit = unit * 0
        origin, units = measure(length, T, UNIT, WINDOW)
    return sequence, unit, units, length, origin, left


@gluon.jit
def count_units(in_sequence, in_share, UNITS: gl.constexpr):
    """Returns how many units the next tile has; a team without work may be beyond the end."""
    return gl.maximum(gl.minimum(gl.minimum(UNITS, in_sequence), in_share), 0)


@gluon.jit
def find_share(
    lengths_ptr,
    batch,
    team,
    num_teams,
    least_units,
    max_splits,
    T: gl.constexpr,
    UNIT: gl.constexpr,
    WINDOW: gl.constexpr,
    BATCH_PAD: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Returns a share's size, where the team's begins, and the place there as `advance` does.

    As `pdserve.kernels.decode_shares` has it, in units. A single sequence (`BATCH_PAD` 1) needs no
    sums over the batch, and its first tile is asked for the sooner.
    """
    if BATCH_PAD == 1:
        length = gl.load(lengths_ptr)
        origin, units = measure(length, T, UNIT, WINDOW)
        share = gl.maximum(gl.cdiv(units, num_teams), gl.cdiv(units, max_splits - 1))
        share = gl.maximum(share, least_units)
        place = team * share
        left = gl.maximum(gl.minimum(share, units - place), 0)
        return share, place, team * 0, place, units, length, origin, left
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    offs_b = gl.arange(0, BATCH_PAD, layout)
    lengths = gl.load(lengths_ptr + offs_b, mask=offs_b < batch, other=0)
    _, units = measure(lengths, T, UNIT, WINDOW)
    ends = gl.associative_scan(units, 0, _add)
    total = gl.max(ends, 0)
    share = gl.maximum(gl.cdiv(total, num_teams), gl.cdiv(gl.max(units, 0), max_splits - 1))
    share = gl.maximum(share, least_units)
    place = team * share
    left = gl.maximum(gl.minimum(share, total - place), 0)
    sequence = gl.sum((ends <= place).to(gl.int32), 0)
    unit = place - gl.max(gl.where(offs_b < sequence, ends, 0), 0)
    length = gl.sum(gl.where(offs_b == sequence, lengths, 0), 0)
    origin, units = measure(length, T, UNIT, WINDOW)
    return share, place, sequence, unit, units, length, origin, left
