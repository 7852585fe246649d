"""Which frames a hand-off consists of: derived alike on both ends, never sent.

A frame covers fixed, absolute token positions [k * frame_tokens, (k + 1) * frame_tokens), so its
content does not depend on how prefill chunked its work. The first frame starts where the decode
worker's cached prefix ends. Whole blocks travel: the last, partly filled one too.
"""

import hashlib
from dataclasses import asdict, astuple, dataclass

from pdserve.config.model import KvGeometry
from pdserve.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """One piece of KV: some consecutive blocks of a sequence, some layers, one pair of ranks."""

    index: int
    first_block: int
    """Position in the sequence's block table, not a block id."""
    num_blocks: int
    end_token: int
    """Computed tokens needed before the frame can be sent."""
    first_layer: int
    num_layers: int
    prefill_rank: int
    decode_rank: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """All frames of one hand-off, ordered by index."""

    frames: tuple[Frame, ...]
    digest: bytes
    """32 bytes over every field of every frame."""

    @property
    def num_blocks(self) -> int:
        """Blocks shipped."""
        return sum(frame.num_blocks for frame in self.frames)

    @property
    def num_bytes(self) -> int:
        """Bytes shipped."""
        return sum(frame.num_bytes for frame in self.frames)

    def count_ready(self, num_computed_tokens: int) -> int:
        """Returns how many leading frames are complete once that many tokens are computed."""
        ready = 0
        for frame in self.frames:
            if frame.end_token > num_computed_tokens:
                break
            ready += 1
        return ready


def make_manifest(
    geometry: KvGeometry, num_tokens: int, num_cached_tokens: int, frame_tokens: int
) -> Manifest:
    """Cuts tokens [num_cached_tokens, num_tokens) into frames; none if all are cached.

    Raises:
        ValueError: frame_tokens or num_cached_tokens is no multiple of the block size, or more
            tokens are cached than there are.
    """
    size = geometry.block_size
    for name, value in (("frame_tokens", frame_tokens), ("num_cached_tokens", num_cached_tokens)):
        if value % size:
            raise ValueError(f"{name} must be a multiple of block_size {size}, got {value}")
    if frame_tokens <= 0:
        raise ValueError(f"frame_tokens must be positive, got {frame_tokens}")
    if not 0 <= num_cached_tokens <= num_tokens:
        raise ValueError(f"num_cached_tokens must be in [0, {num_tokens}], got {num_cached_tokens}")
    frames: list[Frame] = []
    start = num_cached_tokens
    while start < num_tokens:
        end = min(start - start % frame_tokens + frame_tokens, num_tokens)
        num_blocks = -(-end // size) - start // size
        frames.append(
            Frame(
                index=len(frames),
                first_block=start // size,
                num_blocks=num_blocks,
                end_token=end,
                first_layer=0,
                num_layers=geometry.num_layers,
                prefill_rank=0,
                decode_rank=0,
                num_bytes=num_blocks * geometry.bytes_per_block,
            )
        )
        start = end
    return Manifest(frames=tuple(frames), digest=_digest(geometry, frames))


def frame_bytes(geometry: KvGeometry, frame_tokens: int) -> int:
    """Returns the largest frame's size: what a landing slot must hold."""
    return frame_tokens // geometry.block_size * geometry.bytes_per_block


def check_compatible(prefill: KvGeometry, decode: KvGeometry) -> None:
    """Checks that KV of one worker can be used by the other as it is.

    Raises:
        ConfigError: names the first field that differs or is not supported, with both values.
    """
    theirs = asdict(decode)
    for name, value in asdict(prefill).items():
        if theirs[name] != value:
            raise ConfigError(
                f"{name} differs between the prefill and the decode worker: "
                f"{value!r} and {theirs[name]!r}"
            )
    for name, value in (
        ("tensor_parallel", prefill.tensor_parallel),
        ("pipeline_parallel", prefill.pipeline_parallel),
    ):
        if value != 1:
            raise ConfigError(f"{name} must be 1 for a hand-off, got {value}")


def _digest(geometry: KvGeometry, frames: list[Frame]) -> bytes:
    digest = hashlib.sha256(geometry.digest())
    for frame in frames:
        digest.update(b"".join(int(field).to_bytes(8, "big") for field in astuple(frame)))
    return digest.digest()
