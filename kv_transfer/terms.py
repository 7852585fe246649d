"""On what terms a decode worker takes KV: from whom, in which shape, and in which frames."""

from collections.abc import Sequence

from kv_transfer.lanes import KvPair, make_pair
from kv_transfer.plan import Manifest, make_manifest
from kv_transfer.protocol import (
    Envelope,
    Grant,
    Identity,
    LinkEndpoint,
    Refusal,
    RefusalReason,
    salt_digest,
)
from pdserve.config.link_memory import FrameSizes, settle_frames
from pdserve.config.model import KvGeometry
from pdserve.config.worker import HandoffConfig
from pdserve.errors import ConfigError
from pdserve.request import Request, ReservationId


class Terms:
    """What is the same for all reservations of a decode worker."""

    def __init__(
        self,
        me: Identity,
        geometry: KvGeometry,
        config: HandoffConfig,
        link_endpoints: Sequence[LinkEndpoint],
        frame_sizes: FrameSizes | None = None,
    ) -> None:
        """Settles the size of frames; arguments as of `DecodeHandoffs`."""
        self._me = me
        self._geometry = geometry
        self._config = config
        self._frame_sizes = frame_sizes or settle_frames(config, geometry, is_on_gpu=False)
        self._link_endpoints = tuple(link_endpoints)

    def check(self, envelope: Envelope, request: Request) -> KvPair | Refusal:
        """Returns how KV travels from a prefill worker, or why it does not."""
        if not self.is_for_me(envelope):
            return Refusal(reason=RefusalReason.STALE, detail="meant for another incarnation")
        if envelope.compatibility_digest != self._me.compatibility_digest:
            return Refusal(reason=RefusalReason.INCOMPATIBLE, detail="compatibility digests differ")
        if envelope.tenant_salt_digest != salt_digest(request.tenant_salt):
            return Refusal(reason=RefusalReason.INCOMPATIBLE, detail="tenant salt digests differ")
        if envelope.handoff_id != request.handoff_id or envelope.attempt != request.attempt:
            return Refusal(reason=RefusalReason.STALE, detail="envelope and request differ")
        theirs = self._geometry.in_shape(envelope.prefill_shape)
        try:
            return make_pair(theirs, self._geometry, self._config.wire_dtype)
        except ConfigError as error:
            return Refusal(reason=RefusalReason.INCOMPATIBLE, detail=str(error))

    def is_for_me(self, envelope: Envelope) -> bool:
        """Says whether this very life of this worker is meant."""
        return (
            envelope.decode_worker_id == self._me.worker_id
            and envelope.decode_incarnation == self._me.incarnation
        )

    def make_manifest(self, pair: KvPair, num_tokens: int, num_cached_tokens: int) -> Manifest:
        """Cuts the KV of a prompt that is not cached here into frames."""
        size = self._frame_sizes.choose(num_tokens - num_cached_tokens)
        return make_manifest(pair, num_tokens, num_cached_tokens, size.tokens, size.layers)

    def make_grant(
        self,
        reservation_id: ReservationId,
        pair: KvPair,
        manifest: Manifest,
        num_tokens: int,
        num_cached_tokens: int,
    ) -> Grant:
        """Says what prefill must know to send these frames."""
        size = self._frame_sizes.choose(num_tokens - num_cached_tokens)
        return Grant(
            reservation_id=reservation_id,
            num_cached_tokens=num_cached_tokens,
            manifest_digest=manifest.digest,
            links=self._link_endpoints,
            lease_s=self._config.lease_s,
            frame_tokens=size.tokens,
            frame_layers=size.layers,
            decode_shape=self._me.shape,
            wire_dtype=pair.wire_dtype,
        )
