"""Weights of a Llama-family model on a device: products of one input fused, one tensor at a time.

Letters: E hidden size, N outputs, K inputs, D head dim, V vocabulary.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.config.model import ModelConfig
from pdserve.layers.parallel import Shard
from pdserve.models.weights import WeightSource
from pdserve.models.weights_dummy import NORM_SUFFIX
from pdserve.models.weights_sharded import ShardedWeights


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    """One decoder layer. Products are [outputs, inputs], biases None where there are none."""

    input_gain_E: Tensor
    qkv_NE: Tensor
    qkv_bias_N: Tensor | None
    q_gain_D: Tensor | None
    k_gain_D: Tensor | None
    out_EN: Tensor
    out_bias_E: Tensor | None
    mlp_gain_E: Tensor
    gate_up_NE: Tensor
    gate_up_bias_N: Tensor | None
    down_EN: Tensor
    down_bias_E: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelWeights:
    """A whole model, or what one rank has of it."""

    embedding_VE: Tensor
    """Of no token but in the first stage, and in the last one where it is the head."""
    layers: tuple[LayerWeights, ...]
    first_layer: int = 0
    """The place of the first of them in the model."""
    final_gain_E: Tensor
    """Of the norm behind them: the model's last, or that of the next stage's first layer."""
    head_VE: Tensor
    """The embedding itself where the two are tied; of no token but in the last stage."""
    first_token_id: int = 0
    """Of both: a tensor rank has those of its share of the vocabulary."""


class DeviceDummyWeights:
    """Random weights drawn on the device: 16 GB in seconds, where the host would take minutes.

    Their values are others than those of `DummyWeights`, and of another kind of GPU.
    """

    def __init__(self, seed: int, device: torch.device, dtype: torch.dtype) -> None:
        """Keeps the seed."""
        self._seed = seed
        self._device = device
        self._dtype = dtype

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Returns ones for norms, small values for biases, unit-gain values for the rest."""
        if name.endswith(NORM_SUFFIX):
            return torch.ones(shape, dtype=self._dtype, device=self._device)
        digest = hashlib.sha256(f"{self._seed}\x00{name}".encode()).digest()
        generator = torch.Generator(self._device)
        generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        values = torch.empty(shape, dtype=self._dtype, device=self._device)
        values.normal_(generator=generator)
        return values.mul_(0.1 if len(shape) == 1 else shape[-1] ** -0.5)


def load_weights(
    config: ModelConfig,
    source: WeightSource,
    dtype: torch.dtype,
    device: torch.device,
    shard: Shard | None = None,
) -> ModelWeights:
    """Copies a model to a device, tensor by tensor: no second copy of it is ever whole.

    Args:
        config: as large as what is loaded.
        source: of the whole model's weights.
        dtype: of weights.
        device: that computes.
        shard: this rank's part; None is everything.

    Raises:
        ConfigError: a weight is missing or has another shape.
    """
    vocabulary, layers, adds_biases = range(config.vocab_size), range(config.num_layers), True
    is_first = is_last = True
    if shard is not None:
        source = ShardedWeights(source, shard)
        vocabulary, layers = shard.share_of(config.vocab_size), shard.part.layers
        adds_biases = shard.part.tensor_rank == 0
        is_first, is_last = shard.is_first_stage, shard.is_last_stage
    loader = _Loader(source, dtype, device)
    vocab_shape = (len(vocabulary), config.hidden_size)
    embedding = head = torch.empty((0, config.hidden_size), dtype=dtype, device=device)
    if is_first or (is_last and config.has_tied_embeddings):
        embedding = loader.take("model.embed_tokens.weight", vocab_shape)
    if is_last:
        is_tied = config.has_tied_embeddings
        head = embedding if is_tied else loader.take("lm_head.weight", vocab_shape)
    next_norm = "model.norm" if is_last else f"model.layers.{layers.stop}.input_layernorm"
    return ModelWeights(
        embedding_VE=embedding,
        layers=tuple(
            _load_layer(config, index, loader, adds_biases=adds_biases) for index in layers
        ),
        first_layer=layers.start,
        final_gain_E=loader.take(f"{next_norm}.weight", (config.hidden_size,)),
        head_VE=head,
        first_token_id=vocabulary.start,
    )


def _load_layer(
    config: ModelConfig, index: int, loader: "_Loader", *, adds_biases: bool
) -> LayerWeights:
    """Loads a layer; biases of sums over all ranks are added on one of them."""
    name = f"model.layers.{index}"
    attention, mlp = f"{name}.self_attn", f"{name}.mlp"
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_heads * head_dim, config.num_kv_heads * head_dim
    qkv = {f"{attention}.{part}_proj": n for part, n in (("q", queries), ("k", keys), ("v", keys))}
    gate_up = {f"{mlp}.gate_proj": inner, f"{mlp}.up_proj": inner}
    out, down = {f"{attention}.o_proj": hidden}, {f"{mlp}.down_proj": hidden}

    def gain(part: str) -> Tensor | None:
        if not config.has_qk_norm:
            return None
        return loader.take(f"{attention}.{part}_norm.weight", (head_dim,))

    return LayerWeights(
        input_gain_E=loader.take(f"{name}.input_layernorm.weight", (hidden,)),
        qkv_NE=loader.stack(qkv, hidden),
        qkv_bias_N=loader.stack_biases(qkv) if config.has_qkv_bias else None,
        q_gain_D=gain("q"),
        k_gain_D=gain("k"),
        out_EN=loader.stack(out, queries),
        out_bias_E=loader.stack_biases(out) if config.has_output_bias and adds_biases else None,
        mlp_gain_E=loader.take(f"{name}.post_attention_layernorm.weight", (hidden,)),
        gate_up_NE=loader.stack(gate_up, hidden),
        gate_up_bias_N=loader.stack_biases(gate_up) if config.has_mlp_bias else None,
        down_EN=loader.stack(down, inner),
        down_bias_E=loader.stack_biases(down) if config.has_mlp_bias and adds_biases else None,
    )


class _Loader:
    """Puts tensors of a source where they belong on the device."""

    def __init__(self, source: WeightSource, dtype: torch.dtype, device: torch.device) -> None:
        self._source = source
        self._dtype = dtype
        self._device = device

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Returns a tensor of the device's own: a view would keep the whole file mapped."""
        target = torch.empty(shape, dtype=self._dtype, device=self._device)
        return target.copy_(self._source.take(name, shape))

    def stack(self, outputs: Mapping[str, int], num_inputs: int) -> Tensor:
        """Returns the weights of products of one input, one below the other."""
        shapes = {f"{name}.weight": (count, num_inputs) for name, count in outputs.items()}
        return self._stack(shapes)

    def stack_biases(self, outputs: Mapping[str, int]) -> Tensor:
        """Returns their biases, one behind the other."""
        return self._stack({f"{name}.bias": (count,) for name, count in outputs.items()})

    def _stack(self, shapes: Mapping[str, tuple[int, ...]]) -> Tensor:
        num_rows = sum(shape[0] for shape in shapes.values())
        (tail,) = {shape[1:] for shape in shapes.values()}
        target = torch.empty((num_rows, *tail), dtype=self._dtype, device=self._device)
        start = 0
        for name, shape in shapes.items():
            target[start : start + shape[0]].copy_(self._source.take(name, shape))
            start += shape[0]
        return target
