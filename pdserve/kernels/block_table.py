"""From a tile of a sequence's tokens to their slots."""

import triton
import triton.language as tl


@triton.jit
def load_blocks(table_ptr, first, end, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Reads the block ids of tokens from `first`, a multiple of TILE, on; 0 from `end` on.

    Returns:
        A pair of ids where they are enough, so that they are read once and not by every thread;
        else an id for each token, and 0.
    """
    if TILE <= 2 * BLOCK_SIZE:
        index = first // BLOCK_SIZE
        block = tl.load(table_ptr + index, mask=first < end, other=0)
        next_block = block
        if TILE > BLOCK_SIZE:
            next_block = tl.load(table_ptr + index + 1, mask=first + BLOCK_SIZE < end, other=0)
        return block, next_block
    else:
        offs_n = first + tl.arange(0, TILE)
        blocks = tl.load(table_ptr + offs_n // BLOCK_SIZE, mask=offs_n < end, other=0)
        return blocks, 0


@triton.jit
def find_slots(blocks, first, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Returns the slots of a tile's tokens, int64 [TILE]; `blocks` of `load_blocks`."""
    offs = tl.arange(0, TILE)
    if TILE <= BLOCK_SIZE:
        return blocks[0].to(tl.int64) * BLOCK_SIZE + first % BLOCK_SIZE + offs
    elif TILE == 2 * BLOCK_SIZE:
        block = tl.where(offs < BLOCK_SIZE, blocks[0], blocks[1])
        return block.to(tl.int64) * BLOCK_SIZE + offs % BLOCK_SIZE
    else:
        return blocks[0].to(tl.int64) * BLOCK_SIZE + offs % BLOCK_SIZE


@triton.jit
def prefetch_rows(row_ptrs, D: tl.constexpr):
    """Asks for rows of D elements to be brought into L2 (sm_90); nothing is read."""
    num_bytes: tl.constexpr = D * row_ptrs.dtype.element_ty.primitive_bitwidth // 8
    sizes = tl.full(row_ptrs.shape, num_bytes, tl.int32)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [row_ptrs, sizes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
