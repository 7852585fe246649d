"""The Llama family: Llama, Mistral, Qwen2, Qwen3, SmolLM2 and SmolLM3.

They differ in biases, in norms of query and key heads, in layers with a sliding window and in
layers without rotary embeddings; all of it is in their configuration.

Letters: M rows (tokens) of the batch, E hidden size, H query heads, J KV heads, D head dim, V
vocabulary.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from pdserve.cache.kv_tensors import TORCH_DTYPES, KvTensors
from pdserve.config.engine import ATTENTION_TILE_TOKENS, Dtype
from pdserve.config.model import ModelConfig
from pdserve.layers.attention import ForwardBatch, attend, make_reach
from pdserve.layers.linear import Linear, LinearBackend, check_cuts, choose_backend
from pdserve.layers.norm import RmsNorm
from pdserve.layers.parallel import Arrived, Arriving, Shard, make_whole_shard
from pdserve.layers.rotary import RotaryEmbedding, Turns, rotate
from pdserve.models.weights import WeightSource
from pdserve.models.weights_sharded import ShardedWeights


class LlamaModel:
    """A decoder-only transformer with packed weights. Used by one thread."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: Dtype,
        max_model_len: int,
        source: WeightSource,
        shard: Shard | None = None,
    ) -> None:
        """Takes weights one layer at a time and keeps only what was packed.

        Args:
            config: of the whole model.
            dtype: of weights and activations.
            max_model_len: longest sequence.
            source: of the whole model's weights.
            shard: this rank's part; None is everything.

        Raises:
            ConfigError: a weight is missing or has another shape.
        """
        self.config = config
        shard = self._shard = shard or make_whole_shard(config)
        if shard.group is not None:
            source = ShardedWeights(source, shard)
            config = narrow_config(shard)
        self.max_model_len = max_model_len
        self._dtype = TORCH_DTYPES[dtype]
        backend = choose_backend(self._dtype, _product_shapes(config, shard))
        if shard.group is not None and shard.is_exact:
            check_cuts(self._dtype, _cuts(config, shard), backend)
        vocab_shape = (config.vocab_size, config.hidden_size)
        if shard.group is not None:
            vocab_shape = (len(shard.share_of(config.vocab_size)), config.hidden_size)
        is_tied = config.has_tied_embeddings
        self._embedding_VE = torch.empty(0)
        if shard.is_first_stage or (is_tied and shard.is_last_stage):
            # A clone: a view would keep the whole file mapped.
            embedding = source.take("model.embed_tokens.weight", vocab_shape).to(self._dtype)
            self._embedding_VE = embedding.clone()
        self._layers = tuple(
            _Layer(config, index, self._dtype, source, backend, shard)
            for index in shard.part.layers
        )
        self._norm = _norm("model.norm", config, self._dtype, source)
        head = self._embedding_VE
        if not is_tied and shard.is_last_stage:
            head = source.take("lm_head.weight", vocab_shape).to(self._dtype)
        self._head = Linear(head, None, backend) if shard.is_last_stage else None
        num_tiles = -(-max_model_len // ATTENTION_TILE_TOKENS)
        max_tile_kv = num_tiles * ATTENTION_TILE_TOKENS
        self._rotary = RotaryEmbedding(
            config.head_dim, config.rope_theta, max_tile_kv, self._dtype, config.rope_scaling
        )
        windows = [config.window_of(index) for index in shard.part.layers]
        reaches = {window: make_reach(window, max_tile_kv, self._dtype) for window in set(windows)}
        self._reach_of_layer = tuple(reaches[window] for window in windows)

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline that this is a part of."""
        return self._shard.num_stages

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: KvTensors) -> Arriving:
        """Computes every row, writes its KV, and returns logits of the rows that sample.

        Where there are later stages it does not wait for them.

        Returns:
            float32 [num_sample_rows, V] on rank 0; on other ranks it means nothing.
        """
        shard = self._shard
        x_ME = self._enter(batch)
        turns = self._rotary.of_batch(batch)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            keys, values = kv.layer(index)
            q_MHD = layer.project(x_ME, turns, batch.slots, keys, values)
            is_last = index == last and shard.is_last_stage
            if is_last and not batch.sample_rows.numel():
                break
            attend_here = partial(
                attend,
                keys_SJD=keys,
                values_SJD=values,
                batch=batch,
                reach=self._reach_of_layer[index],
            )
            heads_ME = shard.attend(q_MHD, attend_here).flatten(1)
            if is_last:  # past its KV, the last layer matters only to rows that sample
                x_ME = x_ME.index_select(0, batch.sample_rows)
                heads_ME = heads_ME.index_select(0, batch.sample_rows)
            x_ME = layer.finish(x_ME, heads_ME)
        else:
            return self._leave(x_ME, batch)
        return Arrived(torch.empty(0, self.config.vocab_size))

    def _enter(self, batch: ForwardBatch) -> Tensor:
        """Embeds token ids, or takes what the stage before made of them."""
        shard = self._shard
        if not shard.is_first_stage:
            assert shard.stages is not None
            return shard.stages.receive(batch.token_ids.shape[0], self.config.hidden_size)
        if shard.group is None:
            return self._embedding_VE.index_select(0, batch.token_ids)
        rows = shard.share_of(self.config.vocab_size)
        local = batch.token_ids - rows.start
        is_mine = (local >= 0) & (local < len(rows))
        x_ME = self._embedding_VE.index_select(0, torch.where(is_mine, local, 0))
        # Exact: all ranks but one add zero.
        return shard.group.sum(torch.where(is_mine.unsqueeze(1), x_ME, 0.0))

    def _leave(self, x_ME: Tensor, batch: ForwardBatch) -> Arriving:
        """Computes logits, or hands activations on and returns the logits that come of them."""
        shard = self._shard
        num_rows, vocab_size = batch.sample_rows.numel(), self.config.vocab_size
        if not shard.is_last_stage:
            assert shard.stages is not None
            shard.stages.send(x_ME)
            if shard.part.rank > 0 or not num_rows:
                return Arrived(torch.empty(0, vocab_size))
            return shard.stages.expect_logits(num_rows, vocab_size)
        assert self._head is not None
        logits = self._head(self._norm(x_ME)).float()
        if shard.group is not None:
            logits = shard.group.gather(logits, shard.widths_of(vocab_size))
        if shard.stages is not None and shard.part.tensor_rank == 0:
            shard.stages.send_logits(logits)
        return Arrived(logits)


class _Layer:
    """One decoder layer, in two halves: up to its KV, and from there on."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        dtype: torch.dtype,
        source: WeightSource,
        backend: LinearBackend,
        shard: Shard,
    ) -> None:
        self._join = shard.make_join()
        self._head_widths = shard.widths_of(shard.whole.num_heads * shard.whole.head_dim)
        self._inner_widths = tuple(len(share) for share in shard.inner_shares)
        self._hidden_widths = shard.widths_of(config.hidden_size)
        name = f"model.layers.{index}"
        self._num_heads = config.num_heads
        self._num_kv_heads = config.num_kv_heads
        self._head_dim = config.head_dim
        self._is_rotated = index not in config.unrotated_layers
        self._input_norm = _norm(f"{name}.input_layernorm", config, dtype, source)
        self._mlp_norm = _norm(f"{name}.post_attention_layernorm", config, dtype, source)
        self._qk_norm = _qk_norm(f"{name}.self_attn", config, dtype, source)
        take = _ProductReader(source, dtype, backend)
        hidden, inner = config.hidden_size, config.intermediate_size
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        attention, mlp = f"{name}.self_attn", f"{name}.mlp"
        # Products of one input are fused: one pass over the activations, fewer calls.
        self._qkv = take.product(
            {
                f"{attention}.{part}_proj": n
                for part, n in (("q", queries), ("k", keys), ("v", keys))
            },
            hidden,
            has_bias=config.has_qkv_bias,
        )
        self._out = take.product(
            {f"{attention}.o_proj": hidden}, queries, has_bias=config.has_output_bias
        )
        self._gate_up = take.product(
            {f"{mlp}.gate_proj": inner, f"{mlp}.up_proj": inner},
            hidden,
            has_bias=config.has_mlp_bias,
        )
        self._down = take.product({f"{mlp}.down_proj": hidden}, inner, has_bias=config.has_mlp_bias)

    def project(
        self, x_ME: Tensor, turns: Turns, slots: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Writes the rows' keys and values to their slots and returns queries, [M, H, D]."""
        num_rotated = self._num_heads + self._num_kv_heads
        qkv = self._qkv(self._input_norm(x_ME))
        qkv = qkv.view(x_ME.shape[0], num_rotated + self._num_kv_heads, self._head_dim)
        rotated = qkv[:, :num_rotated]
        if self._qk_norm is not None:
            rotated = self._qk_norm(rotated)
        if self._is_rotated:
            rotated = rotate(rotated, turns)
        keys.index_copy_(0, slots, rotated[:, self._num_heads :])
        values.index_copy_(0, slots, qkv[:, num_rotated:])
        return rotated[:, : self._num_heads].contiguous()

    def finish(self, x_ME: Tensor, heads_ME: Tensor) -> Tensor:
        """Adds attention and feed-forward to the residual stream."""
        join = self._join
        heads_ME = join.enter(heads_ME, self._head_widths)
        # In place, here and below: at 256 rows a fresh tensor costs more than what is put in it.
        x_ME = join.leave(self._out(heads_ME), self._hidden_widths).add_(x_ME)
        gate, up = self._gate_up(self._mlp_norm(x_ME)).chunk(2, dim=-1)
        inner = join.enter(functional.silu(gate).mul_(up), self._inner_widths)
        return join.leave(self._down(inner), self._hidden_widths).add_(x_ME)


def narrow_config(shard: Shard) -> ModelConfig:
    """Returns the configuration of a model as large as a rank's part of one."""
    whole = shard.whole
    return replace(
        whole,
        num_heads=shard.num_heads,
        num_kv_heads=len(shard.part.kv_heads),
        intermediate_size=len(shard.inner_share),
    )


def _norm(name: str, config: ModelConfig, dtype: torch.dtype, source: WeightSource) -> RmsNorm:
    weight = source.take(f"{name}.weight", (config.hidden_size,)).to(dtype).clone()
    return RmsNorm(weight, config.rms_norm_eps)


class _QkNorm:
    """Norms each head of queries and keys by itself, by gains of their own."""

    def __init__(self, gain_HD: Tensor, epsilon: float) -> None:
        self._gain_HD = gain_HD
        self._epsilon = epsilon

    def __call__(self, x_MHD: Tensor) -> Tensor:
        # Flat rows: a reduction over a strided view may take another path in another shape.
        flat = x_MHD.reshape(-1, x_MHD.shape[-1])
        normed = functional.rms_norm(flat, flat.shape[-1:], None, self._epsilon)
        return normed.view(x_MHD.shape) * self._gain_HD


def _qk_norm(
    name: str, config: ModelConfig, dtype: torch.dtype, source: WeightSource
) -> _QkNorm | None:
    if not config.has_qk_norm:
        return None
    q_gain, k_gain = (
        source.take(f"{name}.{part}_norm.weight", (config.head_dim,)).to(dtype) for part in "qk"
    )
    gains = (q_gain.expand(config.num_heads, -1), k_gain.expand(config.num_kv_heads, -1))
    return _QkNorm(torch.cat(gains), config.rms_norm_eps)


class _ProductReader:
    """Takes the weights of products that share an input and packs them as one."""

    def __init__(self, source: WeightSource, dtype: torch.dtype, backend: LinearBackend) -> None:
        self._source = source
        self._dtype = dtype
        self._backend = backend

    def product(self, outputs: Mapping[str, int], num_inputs: int, *, has_bias: bool) -> Linear:
        """Returns the product of the named weights, one after the other in its outputs."""
        weights = [
            self._source.take(f"{name}.weight", (num_outputs, num_inputs))
            for name, num_outputs in outputs.items()
        ]
        bias = None
        if has_bias:
            biases = [self._source.take(f"{name}.bias", (n,)) for name, n in outputs.items()]
            bias = torch.cat(biases).to(self._dtype)
        return Linear(torch.cat(weights).to(self._dtype), bias, self._backend)


def _product_shapes(config: ModelConfig, shard: Shard) -> list[tuple[int, int]]:
    """Returns (outputs, inputs) of every product that this rank computes."""
    hidden, inner = config.hidden_size, config.intermediate_size
    heads_width = config.num_heads * config.head_dim
    whole = shard.whole
    joined_outputs = len(shard.share_of(hidden))
    joined = [
        (joined_outputs, whole.num_heads * whole.head_dim),
        (joined_outputs, whole.intermediate_size),
    ]
    if not shard.is_exact:
        joined = [(hidden, heads_width), (hidden, inner)]
    return [
        (heads_width + 2 * config.num_kv_heads * config.head_dim, hidden),
        (2 * inner, hidden),
        (len(shard.share_of(config.vocab_size)), hidden),
        *joined,
    ]


def _cuts(config: ModelConfig, shard: Shard) -> list[tuple[int, int, int]]:
    """Returns (outputs of the whole model, outputs on this rank, inputs) of every product."""
    whole = make_whole_shard(shard.whole)
    here, everywhere = _product_shapes(config, shard), _product_shapes(shard.whole, whole)
    pairs = zip(everywhere, here, strict=True)
    return [(num_whole, num_here, inputs) for (num_whole, inputs), (num_here, _) in pairs]
