"""The words of the hand-off protocol, and the two ladders that speak them.

Prefill side (`prefill_side.PrefillHandoff`, one object per request and attempt)::

                 place           granted            first token           acknowledged
    unplaced ------> reserving --------> sending ------------> committed ------------> handed off
        ^                |                  |                      |
        '----------------+------------------+----------------------'
          refused, unreachable, link down, lease lost, aborted by decode, placed anew meanwhile
          (the computed KV stays; placed again under decode_attempt + 1; nothing is recomputed)

    from anywhere: the first token ends the sequence -> finished
                   cancel                            -> cancelled
                   unplaced for hold_s               -> returned
                   refused for good                  -> refused (nobody will ever take it)

Frames computed before the grant are remembered and pushed when it comes. The commit goes out as
soon as grant and token are there; frames may still be under way.

Decode side (`decode_side.DecodeHandoffs`, one object per worker)::

               frames                  commit + all frames scattered
    reserved ---------> receiving ------------------------------------> started (the scheduler's)
        |                   |
        '-------------------'--> aborting --> released
          abort, cancel, newer attempt, link down, lease expired, bad frame, peer restarted
          (aborting lasts until no scatter is pending: a block is never reused under one)

Who owns a block: on prefill the request, until `ReleaseBlocks`, which each hand-off emits exactly
once. On decode the reservation, until `BlockReserver.release` (once) or `Start` (then the running
sequence). Peers never write blocks: they fill landing slots, and the owner scatters.

Both sides take events and return actions; they do no I/O, and read time from an injected clock.
Only durations cross the wire.
"""

import hashlib
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from pdserve.config.shape import KvShape
from pdserve.request import HandoffId, Incarnation, Request, ReservationId, WorkerId


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """Who one side is, the same for all its hand-offs."""

    worker_id: WorkerId
    incarnation: Incarnation
    compatibility_digest: bytes
    shape: KvShape


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeTarget:
    """The decode worker that the router chose."""

    worker_id: WorkerId
    incarnation: Incarnation
    address: str
    """host:port of its Handoff service."""
    decode_attempt: int


@dataclass(frozen=True, order=True, slots=True)
class AttemptKey:
    """Orders the attempts of one hand-off; a higher one fences all lower ones."""

    attempt: int
    decode_attempt: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Envelope:
    """Identifies one hand-off attempt; the receiver checks every field."""

    handoff_id: HandoffId
    attempt: int
    decode_attempt: int
    prefill_worker_id: WorkerId
    prefill_incarnation: Incarnation
    decode_worker_id: WorkerId
    decode_incarnation: Incarnation
    reservation_id: ReservationId | None
    """None before the grant."""
    tenant_salt_digest: bytes
    compatibility_digest: bytes
    prefill_shape: KvShape
    """How the prefill worker keeps its KV."""

    @property
    def key(self) -> AttemptKey:
        """Orders this attempt among those of the same hand-off."""
        return AttemptKey(self.attempt, self.decode_attempt)


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkEndpoint:
    """Where a decode rank listens for links."""

    host: str
    port: int
    token: bytes
    """The secret that a link must say first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grant:
    """Decode holds blocks for the whole prompt and its growth."""

    reservation_id: ReservationId
    num_cached_tokens: int
    """Leading tokens that decode holds already; a multiple of its block size."""
    manifest_digest: bytes
    links: tuple[LinkEndpoint, ...]
    """Of the decode worker's ranks, in their order."""
    lease_s: float
    frame_tokens: int
    frame_layers: int | None
    """Most layers of a frame; None: all."""
    decode_shape: KvShape
    """How the decode worker keeps its KV."""
    wire_dtype: str
    """Of the values in frames."""


class RefusalReason(Enum):
    """Why decode does not take, or drops, a hand-off."""

    NO_ROOM = "no_room"
    STALE = "stale"
    INCOMPATIBLE = "incompatible"
    DRAINING = "draining"
    CANCELLED = "cancelled"
    TOO_LARGE = "too_large"


_FINAL_REASONS = frozenset({RefusalReason.TOO_LARGE, RefusalReason.INCOMPATIBLE})


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """Decode holds nothing for this attempt."""

    reason: RefusalReason
    detail: str
    retry_after_s: float = 0.0

    @property
    def is_final(self) -> bool:
        """True where asking again would be refused again, however long prefill holds its KV."""
        return self.reason in _FINAL_REASONS


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstToken:
    """The token that prefill sampled; decode goes on after it."""

    token_id: int
    output_index: int
    sample_index: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledAhead:
    """What the commit of a hand-off will say, told over a link, which is faster than a call."""

    reservation_id: ReservationId
    first_tokens: tuple[FirstToken, ...]
    """All of one output index."""
    manifest_digest: bytes


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """Commit and all frames have landed: decode owns the sequence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HandoffAborted:
    """Decode dropped the hand-off; its blocks are free or will be."""

    detail: str
    reason: RefusalReason = RefusalReason.STALE


@dataclass(frozen=True, kw_only=True, slots=True)
class CallFailed:
    """A control call got no answer."""

    detail: str
    is_unreachable: bool = False
    """True: nobody listens there. False: no answer in time, it may have been carried out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReservedBlocks:
    """What the scheduler set aside for a request."""

    num_cached_tokens: int
    """Leading tokens found in the prefix cache and referenced; a multiple of the block size."""


class BlockReserver(Protocol):
    """The decode scheduler, as the hand-off sees it. Called on the engine thread only."""

    def reserve(self, reservation_id: ReservationId, request: Request) -> ReservedBlocks | Refusal:
        """Takes all blocks the prompt and its first growth need, or none."""
        ...

    def release(self, reservation_id: ReservationId) -> None:
        """Gives back the blocks of a reservation that did not start; called once for each."""
        ...

    def stop(self, reservation_id: ReservationId) -> None:
        """Ends a sequence that was started from a reservation, if it still runs, silently."""
        ...


def salt_digest(tenant_salt: bytes) -> bytes:
    """Returns the digest under which a tenant's salt travels in envelopes."""
    return hashlib.sha256(b"pdserve.tenant_salt\x00" + tenant_salt).digest()


def make_envelope(
    me: Identity, request: Request, target: DecodeTarget, reservation_id: ReservationId | None
) -> Envelope:
    """Addresses one attempt of a request from a prefill worker to a decode worker."""
    return Envelope(
        handoff_id=request.handoff_id,
        attempt=request.attempt,
        decode_attempt=target.decode_attempt,
        prefill_worker_id=me.worker_id,
        prefill_incarnation=me.incarnation,
        decode_worker_id=target.worker_id,
        decode_incarnation=target.incarnation,
        reservation_id=reservation_id,
        tenant_salt_digest=salt_digest(request.tenant_salt),
        compatibility_digest=me.compatibility_digest,
        prefill_shape=me.shape,
    )
