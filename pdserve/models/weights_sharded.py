"""Cuts a model's weights for one rank, out of whatever source has the whole of them."""

import torch
from torch import Tensor

from pdserve.layers.parallel import Shard
from pdserve.models.weights import WeightSource

VOCABULARY = ("embed_tokens", "lm_head")
JOINED = ("o_proj", "down_proj")
"""Products over all inputs: see `pdserve.layers.parallel` for which way they are cut."""


class ShardedWeights:
    """A `WeightSource` of one rank: takes whole tensors and returns the rank's share.

    The model asks for shapes of its own size, as if the rank's part were all there is.
    """

    def __init__(self, source: WeightSource, shard: Shard) -> None:
        """Keeps both."""
        self._source = source
        self._shard = shard
        whole = shard.whole
        heads = shard.num_heads * whole.head_dim
        first = shard.part.tensor_rank * heads
        kv_heads = shard.part.kv_heads
        keys = range(kv_heads.start * whole.head_dim, kv_heads.stop * whole.head_dim)
        self._queries = range(first, first + heads)
        self._num_queries = whole.num_heads * whole.head_dim
        inner = (shard.inner_share, whole.intermediate_size)
        keys_of = (keys, whole.num_kv_heads * whole.head_dim)
        self._rows = {
            "q_proj": (self._queries, self._num_queries),
            "k_proj": keys_of,
            "v_proj": keys_of,
            "gate_proj": inner,
            "up_proj": inner,
        }
        for name in VOCABULARY:
            self._rows[name] = (shard.share_of(whole.vocab_size), whole.vocab_size)

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Returns this rank's share of a tensor.

        Raises:
            ConfigError: there is no such tensor, or the whole of it has another shape.
        """
        product = name.split(".")[-2] if "." in name else name
        if product in JOINED:
            return self._take_joined(name, product)
        if product not in self._rows:
            return self._source.take(name, shape)
        rows, num_rows = self._rows[product]
        return self._source.take(name, (num_rows, *shape[1:]))[rows.start : rows.stop]

    def _take_joined(self, name: str, product: str) -> Tensor:
        shard, whole = self._shard, self._shard.whole
        columns, num_columns = self._queries, self._num_queries
        if product == "down_proj":
            columns = shard.inner_share
            num_columns = whole.intermediate_size
        is_bias = name.endswith(".bias")
        shape = (whole.hidden_size,) if is_bias else (whole.hidden_size, num_columns)
        tensor = self._source.take(name, shape)
        if shard.is_exact:
            rows = shard.share_of(whole.hidden_size)
            return tensor[rows.start : rows.stop]
        if is_bias:  # added once
            return tensor if shard.part.tensor_rank == 0 else torch.zeros_like(tensor)
        return tensor[:, columns.start : columns.stop]
