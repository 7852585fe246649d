"""The Llama family: Llama, Mistral, SmolLM2, and Qwen2 (which adds biases to q, k and v).

Letters: M rows (tokens) of the batch, E hidden size, H query heads, J KV heads, D head dim, V
vocabulary.
"""

import torch
from torch import Tensor
from torch.nn import functional

from pdserve.cache.kv_tensors import TORCH_DTYPES, KvTensors
from pdserve.config.engine import ATTENTION_TILE_TOKENS, Dtype
from pdserve.config.model import ModelConfig
from pdserve.kernels.reference import make_tile_mask
from pdserve.layers.attention import ForwardBatch, attend
from pdserve.layers.linear import Linear, LinearBackend, choose_backend
from pdserve.layers.norm import RmsNorm
from pdserve.layers.rotary import RotaryEmbedding, rotate
from pdserve.models.weights import WeightSource


class LlamaModel:
    """A decoder-only transformer with packed weights. Used by one thread."""

    def __init__(
        self, config: ModelConfig, dtype: Dtype, max_model_len: int, source: WeightSource
    ) -> None:
        """Takes weights one layer at a time and keeps only what was packed.

        Raises:
            ConfigError: a weight is missing or has another shape.
        """
        self.config = config
        self.max_model_len = max_model_len
        self._dtype = TORCH_DTYPES[dtype]
        backend = choose_backend(self._dtype, _product_shapes(config))
        vocab_shape = (config.vocab_size, config.hidden_size)
        # A clone: a view would keep the whole file mapped.
        embedding = source.take("model.embed_tokens.weight", vocab_shape).to(self._dtype)
        self._embedding_VE = embedding.clone()
        self._layers = tuple(
            _Layer(config, index, self._dtype, source, backend)
            for index in range(config.num_layers)
        )
        self._norm = _norm("model.norm", config, self._dtype, source)
        head = self._embedding_VE
        if not config.has_tied_embeddings:
            head = source.take("lm_head.weight", vocab_shape).to(self._dtype)
        self._head = Linear(head, None, backend)
        num_tiles = -(-max_model_len // ATTENTION_TILE_TOKENS)
        max_tile_kv = num_tiles * ATTENTION_TILE_TOKENS
        self._rotary = RotaryEmbedding(config.head_dim, config.rope_theta, max_tile_kv, self._dtype)
        self._tile_mask = make_tile_mask(max_tile_kv, self._dtype)

    def forward(self, batch: ForwardBatch, kv: KvTensors) -> Tensor:
        """Computes every row, writes its KV, and returns logits of the rows that sample.

        Returns:
            float32 [num_sample_rows, V].
        """
        return self.logits(self.hidden(batch, kv))

    @torch.inference_mode()
    def logits(self, hidden_ME: Tensor) -> Tensor:
        """Sends rows of `hidden` through the head; any number of them gives the same bits.

        Returns:
            float32 [M, V].
        """
        if not hidden_ME.shape[0]:
            return torch.empty(0, self.config.vocab_size)
        return self._head(hidden_ME).float()

    @torch.inference_mode()
    def hidden(self, batch: ForwardBatch, kv: KvTensors) -> Tensor:
        """Computes every row, writes its KV, and returns the rows that go through the head.

        Returns:
            [num_sample_rows, E], normed.
        """
        x_ME = self._embedding_VE.index_select(0, batch.token_ids)
        cos, sin = self._rotary.at(batch.positions)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            keys, values = kv.layer(index)
            q_MHD = layer.project(x_ME, cos, sin, batch.slots, keys, values)
            is_last = index == last
            if is_last and not batch.sample_rows.numel():
                break
            heads_ME = attend(q_MHD, keys, values, batch, self._tile_mask).flatten(1)
            if is_last:  # past its KV, the last layer matters only to rows that sample
                x_ME = x_ME.index_select(0, batch.sample_rows)
                heads_ME = heads_ME.index_select(0, batch.sample_rows)
            x_ME = layer.finish(x_ME, heads_ME)
        else:
            return self._norm(x_ME)
        return x_ME[:0]


class _Layer:
    """One decoder layer, in two halves: up to its KV, and from there on."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        dtype: torch.dtype,
        source: WeightSource,
        backend: LinearBackend,
    ) -> None:
        name = f"model.layers.{index}"
        self._num_heads = config.num_heads
        self._num_kv_heads = config.num_kv_heads
        self._head_dim = config.head_dim
        self._input_norm = _norm(f"{name}.input_layernorm", config, dtype, source)
        self._mlp_norm = _norm(f"{name}.post_attention_layernorm", config, dtype, source)
        self._qkv = _qkv(f"{name}.self_attn", config, dtype, source, backend)
        hidden, inner = config.hidden_size, config.intermediate_size
        out_shape = (hidden, config.num_heads * config.head_dim)
        out = source.take(f"{name}.self_attn.o_proj.weight", out_shape)
        self._out = Linear(out.to(dtype), None, backend)
        gate_up = torch.cat(
            [
                source.take(f"{name}.mlp.{part}_proj.weight", (inner, hidden))
                for part in ("gate", "up")
            ]
        )
        self._gate_up = Linear(gate_up.to(dtype), None, backend)
        down = source.take(f"{name}.mlp.down_proj.weight", (hidden, inner))
        self._down = Linear(down.to(dtype), None, backend)

    def project(
        self, x_ME: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Writes the rows' keys and values to their slots and returns queries, [M, H, D]."""
        num_rotated = self._num_heads + self._num_kv_heads
        qkv = self._qkv(self._input_norm(x_ME))
        qkv = qkv.view(x_ME.shape[0], num_rotated + self._num_kv_heads, self._head_dim)
        rotated = rotate(qkv[:, :num_rotated], cos, sin)
        keys.index_copy_(0, slots, rotated[:, self._num_heads :])
        values.index_copy_(0, slots, qkv[:, num_rotated:])
        return rotated[:, : self._num_heads].contiguous()

    def finish(self, x_ME: Tensor, heads_ME: Tensor) -> Tensor:
        """Adds attention and feed-forward to the residual stream."""
        x_ME = x_ME + self._out(heads_ME)
        gate_up = self._gate_up(self._mlp_norm(x_ME))
        gate, up = gate_up.chunk(2, dim=-1)
        return x_ME + self._down(functional.silu(gate) * up)


def _norm(name: str, config: ModelConfig, dtype: torch.dtype, source: WeightSource) -> RmsNorm:
    weight = source.take(f"{name}.weight", (config.hidden_size,)).to(dtype).clone()
    return RmsNorm(weight, config.rms_norm_eps)


def _qkv(
    name: str,
    config: ModelConfig,
    dtype: torch.dtype,
    source: WeightSource,
    backend: LinearBackend,
) -> Linear:
    """Fuses three products into one: one pass over the activations, fewer calls."""
    widths = {
        "q": config.num_heads * config.head_dim,
        "k": config.num_kv_heads * config.head_dim,
        "v": config.num_kv_heads * config.head_dim,
    }
    weights = [
        source.take(f"{name}.{part}_proj.weight", (width, config.hidden_size))
        for part, width in widths.items()
    ]
    bias = None
    if config.has_qkv_bias:
        biases = [source.take(f"{name}.{part}_proj.bias", (w,)) for part, w in widths.items()]
        bias = torch.cat(biases).to(dtype)
    return Linear(torch.cat(weights).to(dtype), bias, backend)


def _product_shapes(config: ModelConfig) -> list[tuple[int, int]]:
    """Returns (outputs, inputs) of every product of the model."""
    hidden, inner = config.hidden_size, config.intermediate_size
    heads_width = config.num_heads * config.head_dim
    return [
        (heads_width + 2 * config.num_kv_heads * config.head_dim, hidden),
        (hidden, heads_width),
        (2 * inner, hidden),
        (hidden, inner),
        (config.vocab_size, hidden),
    ]
