"""Which frames a hand-off consists of: derived alike on both ends, never sent.

A frame covers fixed, absolute token positions [k * frame_tokens, (k + 1) * frame_tokens), so its
content does not depend on how prefill chunked its work. The first frame starts where the decode
worker's cached prefix ends, the last one ends with the prompt. Each stretch of tokens is cut into
groups of layers, in the order in which they are computed, and each group into one frame per lane:
so both ends may differ in ranks; they may in block size, as frames count tokens, and in dtype, as
frames have one of their own.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

from kv_transfer.lanes import KvPair, Lane, make_lanes


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """One piece of KV: some consecutive tokens, layers and KV heads, from one rank to another."""

    index: int
    first_token: int
    end_token: int
    """Exclusive; so many tokens must be computed before the frame can be sent."""
    first_layer: int
    num_layers: int
    first_head: int
    num_heads: int
    prefill_rank: int
    decode_rank: int
    num_bytes: int
    dtype: str
    """Of its values."""

    @property
    def tokens(self) -> range:
        """Positions in the sequence."""
        return range(self.first_token, self.end_token)

    @property
    def layers(self) -> range:
        """Layers of the model."""
        return range(self.first_layer, self.first_layer + self.num_layers)

    @property
    def heads(self) -> range:
        """KV heads of the model."""
        return range(self.first_head, self.first_head + self.num_heads)


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """All frames of one hand-off, ordered by index."""

    frames: tuple[Frame, ...]
    num_blocks: int
    """Blocks of the decode worker that are filled."""
    digest: bytes
    """32 bytes over both shapes and every field of every frame."""

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
    pair: KvPair,
    num_tokens: int,
    num_cached_tokens: int,
    frame_tokens: int,
    frame_layers: int | None = None,
) -> Manifest:
    """Cuts tokens [num_cached_tokens, num_tokens) into frames; none if all are cached.

    Args:
        pair: both ends.
        num_tokens: of the prompt.
        num_cached_tokens: of them that decode has.
        frame_tokens: most tokens of a frame.
        frame_layers: most layers of a frame; None: all that its ranks have in common.

    Raises:
        ValueError: frame_tokens or num_cached_tokens is no multiple of the decode worker's block
            size, more tokens are cached than there are, or frame_layers is not positive.
    """
    size = pair.decode.block_size
    for name, value in (("frame_tokens", frame_tokens), ("num_cached_tokens", num_cached_tokens)):
        if value % size:
            raise ValueError(f"{name} must be a multiple of block_size {size}, got {value}")
    if frame_tokens <= 0:
        raise ValueError(f"frame_tokens must be positive, got {frame_tokens}")
    if not 0 <= num_cached_tokens <= num_tokens:
        raise ValueError(f"num_cached_tokens must be in [0, {num_tokens}], got {num_cached_tokens}")
    if frame_layers is not None and frame_layers <= 0:
        raise ValueError(f"frame_layers must be positive, got {frame_layers}")
    pieces = _cut_layers(make_lanes(pair), frame_layers)
    frames: list[Frame] = []
    start = num_cached_tokens
    while start < num_tokens:
        end = min(start - start % frame_tokens + frame_tokens, num_tokens)
        for lane in pieces:
            frames.append(
                Frame(
                    index=len(frames),
                    first_token=start,
                    end_token=end,
                    first_layer=lane.layers.start,
                    num_layers=len(lane.layers),
                    first_head=lane.heads.start,
                    num_heads=len(lane.heads),
                    prefill_rank=lane.prefill_rank,
                    decode_rank=lane.decode_rank,
                    num_bytes=pair.frame_bytes(end - start, len(lane.layers), len(lane.heads)),
                    dtype=pair.wire_dtype,
                )
            )
        start = end
    return Manifest(
        frames=tuple(frames),
        num_blocks=-(-num_tokens // size) - num_cached_tokens // size,
        digest=_digest(pair, frames),
    )


def _cut_layers(lanes: Sequence[Lane], frame_layers: int | None) -> list[Lane]:
    """Cuts lanes at fixed layers of the model, the first layers of all lanes first."""
    if frame_layers is None:
        return list(lanes)
    pieces: list[Lane] = []
    last = max(lane.layers.stop for lane in lanes)
    for start in range(0, last, frame_layers):
        for lane in lanes:
            layers = range(
                max(start, lane.layers.start), min(start + frame_layers, lane.layers.stop)
            )
            if layers:
                pieces.append(replace(lane, layers=layers))
    return pieces


def _digest(pair: KvPair, frames: list[Frame]) -> bytes:
    digest = hashlib.sha256(pair.decode.digest())
    for geometry in (pair.prefill, pair.decode):
        digest.update(repr(astuple(geometry.shape)).encode())
    digest.update(pair.wire_dtype.encode())
    for frame in frames:
        digest.update(repr(astuple(frame)).encode())
    return digest.digest()
