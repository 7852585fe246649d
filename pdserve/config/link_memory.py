"""How large frames are, and how much memory the links of a rank take on its GPU. Pure."""

from dataclasses import dataclass

from pdserve.config.model import KvGeometry
from pdserve.config.shape import WIRE_BYTES, count_frame_bytes
from pdserve.config.worker import HandoffConfig
from pdserve.request import Role

DEVICE_FRAME_BYTES = 64 << 20
"""A frame costs either end 0.1 ms of launches and notices; 64 MiB take NVLink 0.18 ms."""
HOST_FRAME_BYTES = 6 << 20
MAX_FRAME_TOKENS = 512
"""Of all layers. Such a frame leaves when all its tokens are computed: longer ones would wait for
later chunks."""
MAX_LAYERED_TOKENS = 2048
"""Of some layers: as many as one step computes. Such frames leave in the middle of a step."""
DEVICE_FRAME_LAYERS = 8
SLOT_ALIGNMENT_BYTES = 256
NUM_STAGED = 2
"""Staging buffers of an NCCL link that sends: one is packed while the other is sent."""
NCCL_BYTES = 512 << 20
"""What NCCL takes for its first communicator in a process (2.28.9, H200)."""
NCCL_LINK_BYTES = 256 << 20
"""What each further one takes at 16 thread blocks: 70 MiB to send, 200 MiB to receive."""


@dataclass(frozen=True, slots=True)
class FrameSize:
    """What a frame holds at most."""

    tokens: int
    layers: int | None = None
    """None: all that two ranks have in common."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameSizes:
    """How a decode worker wants prompts cut."""

    whole: FrameSize
    """Of short prompts."""
    layered: FrameSize | None
    """Of long ones; None: they are cut as short ones are."""
    layered_from_tokens: int

    def choose(self, num_tokens: int) -> FrameSize:
        """Returns the size of a prompt's frames, by the tokens that are sent."""
        if self.layered is None or num_tokens < self.layered_from_tokens:
            return self.whole
        return self.layered


def settle_frames(handoff: HandoffConfig, geometry: KvGeometry, *, is_on_gpu: bool) -> FrameSizes:
    """Returns what the settings say of frames, or what is good for a decode worker's links."""

    def make(layers: int | None) -> FrameSize:
        tokens = handoff.frame_tokens
        if tokens is None:
            tokens = choose_frame_tokens(geometry, layers, is_on_gpu=is_on_gpu)
        return FrameSize(tokens, layers)

    layers = handoff.frame_layers
    if layers is None and is_on_gpu:
        layers = DEVICE_FRAME_LAYERS
    most_layers = max(len(part.layers) for part in geometry.parts)
    is_layered = layers is not None and layers < most_layers
    return FrameSizes(
        whole=make(None),
        layered=make(layers) if is_layered else None,
        layered_from_tokens=handoff.layered_from_tokens,
    )


def choose_frame_tokens(
    geometry: KvGeometry, frame_layers: int | None = None, *, is_on_gpu: bool
) -> int:
    """Returns how many tokens make a frame of a good size for the links of a decode worker.

    A power of two of its blocks: its largest share of so many tokens stays within the target.
    """
    target_bytes = DEVICE_FRAME_BYTES if is_on_gpu else HOST_FRAME_BYTES
    max_tokens = MAX_FRAME_TOKENS if frame_layers is None else MAX_LAYERED_TOKENS
    num_heads = max(
        min(len(part.layers), frame_layers or len(part.layers)) * len(part.kv_heads)
        for part in geometry.parts
    )
    token_bytes = 2 * num_heads * geometry.head_dim * geometry.item_bytes
    frame_tokens = geometry.block_size
    while frame_tokens * 2 <= max_tokens and frame_tokens * 2 * token_bytes <= target_bytes:
        frame_tokens *= 2
    return frame_tokens


def max_frame_bytes(
    geometry: KvGeometry,
    rank: int,
    frame_tokens: int,
    wire_dtype: str,
    frame_layers: int | None = None,
) -> int:
    """Returns the size of the largest frame that a decode rank can get: of a landing slot.

    No wire dtype that is negotiated is wider than the decode worker's own.
    """
    part = geometry.parts[rank]
    dtype = wire_dtype if wire_dtype in WIRE_BYTES else geometry.dtype
    num_layers = min(len(part.layers), frame_layers or len(part.layers))
    num_rows = 2 * frame_tokens * num_layers * len(part.kv_heads)
    return count_frame_bytes(num_rows, geometry.head_dim, dtype)


def link_slot_bytes(
    handoff: HandoffConfig, geometry: KvGeometry, rank: int, *, is_on_gpu: bool
) -> int:
    """Returns the size of a landing slot of a decode rank: any frame fits."""
    sizes = settle_frames(handoff, geometry, is_on_gpu=is_on_gpu)
    num_bytes = max(
        max_frame_bytes(geometry, rank, size.tokens, handoff.wire_dtype, size.layers)
        for size in (sizes.whole, sizes.layered)
        if size is not None
    )
    return -(-num_bytes // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES


def link_memory_bytes(handoff: HandoffConfig, geometry: KvGeometry, rank: int, role: Role) -> int:
    """Returns what the links of a rank may take on its GPU, to be kept from the KV.

    All links that the settings allow, at their largest: rings on decode, staging buffers on
    prefill (of peers with slots like ours), and communicators if NCCL may be used. Links are made
    later than the KV, and closed links give all of it back.
    """
    has_nccl, has_push = "nccl" in handoff.transports, "push" in handoff.transports
    slot_bytes = link_slot_bytes(handoff, geometry, rank, is_on_gpu=True)
    per_link = NCCL_LINK_BYTES if has_nccl else 0
    if role is Role.DECODE:
        per_link += handoff.ring_slots * slot_bytes if has_nccl or has_push else 0
    else:
        per_link += NUM_STAGED * slot_bytes if has_nccl else 0
    return handoff.max_device_links * per_link + (NCCL_BYTES if has_nccl else 0)
