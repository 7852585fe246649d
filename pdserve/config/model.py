"""What a model is, read from its own files; and the shape of its KV."""

import hashlib
from dataclasses import asdict, dataclass, replace

from pdserve.config.rope import RopeScaling
from pdserve.config.shape import ITEM_BYTES, KvShape, RankPart, split_model

AGREED_FIELDS = (
    "num_layers",
    "num_kv_heads",
    "head_dim",
    "model_revision",
    "layout",
    "wire_version",
)
"""Of `KvGeometry`: two workers exchange KV only if these are equal."""


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
    """The KV of one replica: what must agree between two that exchange it, and its own shape."""

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
    wire_version: int = 2

    @property
    def item_bytes(self) -> int:
        """Bytes of one value."""
        return ITEM_BYTES[self.dtype]

    @property
    def bytes_per_token(self) -> int:
        """KV bytes of one token over all layers: 2 x layers x KV heads x head dim x item."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.item_bytes

    @property
    def bytes_per_block(self) -> int:
        """KV bytes of one block over all layers and ranks."""
        return self.bytes_per_token * self.block_size

    @property
    def num_ranks(self) -> int:
        """Rank processes of the replica."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def shape(self) -> KvShape:
        """What may differ between two workers that exchange KV."""
        return KvShape(
            tensor_parallel=self.tensor_parallel,
            pipeline_parallel=self.pipeline_parallel,
            block_size=self.block_size,
            dtype=self.dtype,
        )

    @property
    def parts(self) -> tuple[RankPart, ...]:
        """What each rank holds, ordered by rank.

        Raises:
            ConfigError: the ranks cannot share this model.
        """
        return split_model(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            tensor_parallel=self.tensor_parallel,
            pipeline_parallel=self.pipeline_parallel,
        )

    def in_shape(self, shape: KvShape) -> "KvGeometry":
        """Returns the same KV as another worker keeps it."""
        return replace(
            self,
            tensor_parallel=shape.tensor_parallel,
            pipeline_parallel=shape.pipeline_parallel,
            block_size=shape.block_size,
            dtype=shape.dtype,
        )

    def bytes_per_block_on(self, part: RankPart) -> int:
        """KV bytes of one block on one rank."""
        values = 2 * len(part.layers) * len(part.kv_heads) * self.head_dim
        return values * self.item_bytes * self.block_size

    def digest(self) -> bytes:
        """Returns 32 bytes that differ when a field differs that must agree."""
        fields = asdict(self)
        text = "\x00".join(f"{name}={fields[name]}" for name in AGREED_FIELDS)
        return hashlib.sha256(text.encode()).digest()
