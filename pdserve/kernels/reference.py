"""Attention over paged KV in plain torch: the CPU path, and the oracle of other kernels.

Letters: T query tokens, S KV tokens, H query heads, G query heads per KV head, J KV heads, D head
dim; "slots" run over all blocks of the cache.

How equal bits are kept. A prompt token is always computed inside the tile of 64 absolute
positions that it belongs to, by a product of one fixed shape over KV up to the end of that tile;
what lies behind the token is masked, so neither a chunk's border nor a neighbour changes a bit.
An output token is always computed alone over exactly its own KV, in decode and in a replay.
"""

import torch
from torch import Tensor
from torch.nn import functional

from pdserve.config.engine import ATTENTION_TILE_TOKENS


def make_tile_mask(max_kv_tokens: int, dtype: torch.dtype, window: int | None = None) -> Tensor:
    """Returns the additive mask of a tile, [tile, kv_tokens]; its last columns are the tile.

    The mask for a shorter KV is `mask[:, -kv_tokens:]`.

    Args:
        max_kv_tokens: columns of a mask without window, at least one tile.
        dtype: of queries and keys.
        window: tokens that a query sees, itself included. The mask then has no more columns than
            any query of a tile sees.
    """
    tile = ATTENTION_TILE_TOKENS
    assert max_kv_tokens >= tile
    num_columns = max_kv_tokens if window is None else min(max_kv_tokens, window - 1 + tile)
    ages = torch.arange(tile)[:, None] - torch.arange(num_columns)[None] + num_columns - tile
    is_hidden = ages < 0
    if window is not None:
        is_hidden |= ages >= window
    return torch.zeros(tile, num_columns).masked_fill_(is_hidden, float("-inf")).to(dtype)


def gather_blocks(slots_SJD: Tensor, block_index: Tensor, block_size: int) -> Tensor:
    """Copies the KV of scattered blocks into one run, [num_blocks * block_size, J, D]."""
    blocks = slots_SJD.view(-1, block_size, *slots_SJD.shape[1:])
    return blocks.index_select(0, block_index).flatten(0, 1)


def attend_tile(
    q_THD: Tensor, keys_SJD: Tensor, values_SJD: Tensor, offset: int, mask: Tensor
) -> Tensor:
    """Attends from prompt tokens of one tile to KV up to the tile's end.

    Args:
        q_THD: queries of consecutive tokens of one tile.
        keys_SJD: keys from position 0 to the tile's end; zeros behind the last token.
        values_SJD: values likewise.
        offset: place of the first query in the tile.
        mask: of `make_tile_mask`, as long as the keys.

    Returns:
        [T, H, D].
    """
    num_tokens = q_THD.shape[0]
    if num_tokens < ATTENTION_TILE_TOKENS:
        after = ATTENTION_TILE_TOKENS - offset - num_tokens
        q_THD = functional.pad(q_THD, (0, 0, 0, 0, offset, after))
    out_1HTD = functional.scaled_dot_product_attention(
        q_THD.transpose(0, 1).unsqueeze(0),
        keys_SJD.transpose(0, 1).unsqueeze(0),
        values_SJD.transpose(0, 1).unsqueeze(0),
        attn_mask=mask,
        enable_gqa=True,
    )
    return out_1HTD[0].transpose(0, 1)[offset : offset + num_tokens]


def attend_row(q_1JGD: Tensor, keys_1JSD: Tensor, values_1JSD: Tensor) -> Tensor:
    """Attends from one output token to exactly its own KV.

    The query heads of a KV head are taken as rows of one product: nothing is masked, so there is
    no need to repeat keys.

    Returns:
        [1, J, G, D].
    """
    return functional.scaled_dot_product_attention(q_1JGD, keys_1JSD, values_1JSD)
