"""What a model is, read from its own files; and the shape of its KV."""

import hashlib
from dataclasses import asdict, dataclass

from pdserve.config.rope import RopeScaling


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Shape and constants of a decoder-only transformer of the Llama family."""

    architecture: str
    """`llama`, `mistral`, `qwen2`, `qwen3` or `smollm3`."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    max_position: int
    """Longest context in tokens, scaling included."""
    has_tied_embeddings: bool
    has_qkv_bias: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None = None
    has_output_bias: bool = False
    """Of attention's output product."""
    has_mlp_bias: bool = False
    has_qk_norm: bool = False
    """Whether each head of queries and keys is normed before it is rotated."""
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None
    """Tokens that a windowed layer sees, the current one included."""
    windowed_layers: frozenset[int] = frozenset()
    """Layers that see no further back than `sliding_window`."""
    unrotated_layers: frozenset[int] = frozenset()
    """Layers without rotary embeddings (NoPE)."""
    revision: str = ""
    """Digest of the weights' source; KV of different revisions never mixes."""

    def window_of(self, layer: int) -> int | None:
        """Returns how many tokens a layer sees; None for all."""
        return self.sliding_window if layer in self.windowed_layers else None


@dataclass(frozen=True, kw_only=True, slots=True)
class KvGeometry:
    """The shape of KV blocks on one replica; two workers exchange KV only if theirs agree."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    """`float32` or `bfloat16`."""
    model_revision: str
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    layout: str = "LKBSHD"
    """Order of dimensions: layer, K or V, block, slot, head, dim."""
    wire_version: int = 1

    @property
    def item_bytes(self) -> int:
        """Bytes of one value."""
        return 2 if self.dtype == "bfloat16" else 4

    @property
    def bytes_per_token(self) -> int:
        """KV bytes of one token over all layers: 2 x layers x KV heads x head dim x item."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.item_bytes

    @property
    def bytes_per_block(self) -> int:
        """KV bytes of one block over all layers."""
        return self.bytes_per_token * self.block_size

    def digest(self) -> bytes:
        """Returns 32 bytes that differ when any field differs."""
        text = "\x00".join(f"{name}={value}" for name, value in asdict(self).items())
        return hashlib.sha256(text.encode()).digest()
