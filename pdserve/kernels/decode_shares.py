"""How the KV of a batch is dealt out to the programs of a decode launch.

Programs come in teams of one for each KV head (and group of its rows): a team's programs read the
same blocks at the same time, so that memory is read in whole rows. Each sequence's KV is counted in
tiles from where its oldest query's reach begins. Either the tiles of all sequences are laid end to
end and cut into equal shares, one for each team (Stream-K, https://arxiv.org/abs/2301.03598), or
each sequence is cut into splits of a fixed size. The kernel and the one that merges its pieces
compute the same cuts from the lengths alone.

Letters: T query tokens per sequence, B sequences.
"""

import triton
import triton.language as tl


@triton.jit
def first_token(lengths, T: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """Returns where the oldest query's reach begins, rounded down to a tile."""
    if WINDOW is None:
        return lengths * 0
    else:
        return tl.maximum(lengths - (T - 1) - WINDOW, 0) // TILE * TILE


@triton.jit
def split_tiles(tiles, fixed_tiles, max_splits):
    """Returns the size of a sequence's fixed splits: grown by a whole factor if they are many."""
    num_splits = tl.maximum(tl.cdiv(tiles, fixed_tiles), 1)
    return fixed_tiles * tl.cdiv(num_splits, max_splits)


@triton.jit
def count_tiles(
    lengths_ptr,
    batch,
    T: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    BATCH_PAD: tl.constexpr,
):
    """Returns each sequence's number of tiles, [BATCH_PAD]."""
    offs_b = tl.arange(0, BATCH_PAD)
    lengths = tl.load(lengths_ptr + offs_b, mask=offs_b < batch, other=0)
    return tl.cdiv(lengths - first_token(lengths, T, TILE, WINDOW), TILE)


@triton.jit
def share_tiles(tiles, num_teams, least_tiles, max_splits):
    """Returns the tiles of each team's share; no sequence is cut into more than max_splits."""
    share = tl.cdiv(tl.sum(tiles, 0), num_teams)
    share = tl.maximum(share, tl.cdiv(tl.max(tiles, 0), max_splits - 1))
    return tl.maximum(share, least_tiles)


@triton.jit
def count_pieces(start, tiles, share):
    """Returns how many shares the tiles of a sequence touch that begin at `start`."""
    return (start + tiles - 1) // share - start // share + 1
