"""What a prefill worker makes of a grant: the frames to send, and the links they take."""

from kv_transfer.lanes import make_pair
from kv_transfer.plan import Manifest, make_manifest
from kv_transfer.prefill_actions import LinkUse
from kv_transfer.protocol import DecodeTarget, Grant
from pdserve.config.model import KvGeometry
from pdserve.errors import ConfigError


def derive_manifest(geometry: KvGeometry, grant: Grant, num_tokens: int) -> Manifest | None:
    """Derives the frames that decode expects; None if its words do not fit together."""
    theirs = geometry.in_shape(grant.decode_shape)
    if len(grant.links) != theirs.num_ranks:
        return None
    try:
        manifest = make_manifest(
            make_pair(geometry, theirs, grant.wire_dtype),
            num_tokens,
            grant.num_cached_tokens,
            grant.frame_tokens,
            grant.frame_layers,
        )
    except (ConfigError, ValueError):
        return None
    return manifest if manifest.digest == grant.manifest_digest else None


def list_links(manifest: Manifest, grant: Grant, target: DecodeTarget) -> tuple[LinkUse, ...]:
    """Returns the links that a manifest's frames take."""
    pairs = {(frame.prefill_rank, frame.decode_rank) for frame in manifest.frames}
    return tuple(
        LinkUse(
            target=target,
            endpoint=grant.links[decode_rank],
            prefill_rank=prefill_rank,
            decode_rank=decode_rank,
        )
        for prefill_rank, decode_rank in sorted(pairs)
    )
