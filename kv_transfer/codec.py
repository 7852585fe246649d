"""Turns the protocol's plain data into messages of handoff.proto and back."""

from collections.abc import Iterable

from kv_transfer.protocol import (
    Acknowledged,
    CallFailed,
    Envelope,
    FirstToken,
    Grant,
    HandoffAborted,
    LinkEndpoint,
    Refusal,
    RefusalReason,
)
from kv_transfer.transport import LinkStatus
from pdserve.request import HandoffId, Incarnation, Request, ReservationId, WorkerId
from pdserve.rpc.codec import request_to_wire
from pdserve.rpc.v1 import handoff_pb2, inference_pb2, rank_pb2

_UNAVAILABLE = 14
"""google.rpc.Code of a peer that nobody answers for."""

_REASON_TO_WIRE = {
    RefusalReason.NO_ROOM: handoff_pb2.Refusal.REASON_NO_ROOM,
    RefusalReason.STALE: handoff_pb2.Refusal.REASON_STALE,
    RefusalReason.INCOMPATIBLE: handoff_pb2.Refusal.REASON_INCOMPATIBLE,
    RefusalReason.DRAINING: handoff_pb2.Refusal.REASON_DRAINING,
    RefusalReason.CANCELLED: handoff_pb2.Refusal.REASON_CANCELLED,
    RefusalReason.TOO_LARGE: handoff_pb2.Refusal.REASON_TOO_LARGE,
}
_REASON_FROM_WIRE = {wire: reason for reason, wire in _REASON_TO_WIRE.items()}


def envelope_to_wire(envelope: Envelope) -> handoff_pb2.Envelope:
    """Encodes an envelope."""
    return handoff_pb2.Envelope(
        handoff_id=envelope.handoff_id,
        attempt=envelope.attempt,
        decode_attempt=envelope.decode_attempt,
        prefill_worker_id=envelope.prefill_worker_id,
        prefill_incarnation=envelope.prefill_incarnation,
        decode_worker_id=envelope.decode_worker_id,
        decode_incarnation=envelope.decode_incarnation,
        reservation_id=envelope.reservation_id or b"",
        tenant_salt_digest=envelope.tenant_salt_digest,
        compatibility_digest=envelope.compatibility_digest,
    )


def envelope_from_wire(wire: handoff_pb2.Envelope) -> Envelope:
    """Decodes an envelope; every field is checked by the protocol."""
    reservation_id = ReservationId(wire.reservation_id) if wire.reservation_id else None
    return Envelope(
        handoff_id=HandoffId(wire.handoff_id),
        attempt=wire.attempt,
        decode_attempt=wire.decode_attempt,
        prefill_worker_id=WorkerId(wire.prefill_worker_id),
        prefill_incarnation=Incarnation(wire.prefill_incarnation),
        decode_worker_id=WorkerId(wire.decode_worker_id),
        decode_incarnation=Incarnation(wire.decode_incarnation),
        reservation_id=reservation_id,
        tenant_salt_digest=wire.tenant_salt_digest,
        compatibility_digest=wire.compatibility_digest,
    )


def reserve_to_wire(envelope: Envelope, request: Request) -> handoff_pb2.ReserveRequest:
    """Encodes a Reserve call."""
    return handoff_pb2.ReserveRequest(
        envelope=envelope_to_wire(envelope), request=request_to_wire(request)
    )


def reserve_answer_to_wire(answer: Grant | Refusal) -> handoff_pb2.ReserveResponse:
    """Encodes a grant or a refusal."""
    if isinstance(answer, Refusal):
        refusal = handoff_pb2.Refusal(
            reason=_REASON_TO_WIRE[answer.reason],
            detail=answer.detail,
            retry_after_s=answer.retry_after_s,
        )
        return handoff_pb2.ReserveResponse(refusal=refusal)
    link = answer.link
    grant = handoff_pb2.Grant(
        reservation_id=answer.reservation_id,
        num_cached_tokens=answer.num_cached_tokens,
        manifest_digest=answer.manifest_digest,
        link=handoff_pb2.LinkEndpoint(host=link.host, port=link.port, token=link.token),
        lease_s=answer.lease_s,
        frame_tokens=answer.frame_tokens,
    )
    return handoff_pb2.ReserveResponse(grant=grant)


def reserve_answer_from_wire(wire: handoff_pb2.ReserveResponse) -> Grant | Refusal | CallFailed:
    """Decodes the answer to a Reserve call; one without an outcome counts as failed."""
    match wire.WhichOneof("outcome"):
        case "grant":
            grant = wire.grant
            link = LinkEndpoint(host=grant.link.host, port=grant.link.port, token=grant.link.token)
            return Grant(
                reservation_id=ReservationId(grant.reservation_id),
                num_cached_tokens=grant.num_cached_tokens,
                manifest_digest=grant.manifest_digest,
                link=link,
                lease_s=grant.lease_s,
                frame_tokens=grant.frame_tokens,
            )
        case "refusal":
            return Refusal(
                reason=_REASON_FROM_WIRE[wire.refusal.reason],
                detail=wire.refusal.detail,
                retry_after_s=wire.refusal.retry_after_s,
            )
        case _:
            return CallFailed(detail="an answer without an outcome")


def commit_to_wire(
    envelope: Envelope, token: FirstToken, manifest_digest: bytes
) -> handoff_pb2.CommitRequest:
    """Encodes a Commit call."""
    first = handoff_pb2.FirstToken(
        sample_index=token.sample_index,
        output_index=token.output_index,
        token_id=token.token_id,
    )
    return handoff_pb2.CommitRequest(
        envelope=envelope_to_wire(envelope), first_tokens=[first], manifest_digest=manifest_digest
    )


def first_token_from_wire(wire: handoff_pb2.FirstToken) -> FirstToken:
    """Decodes a first token."""
    return FirstToken(
        token_id=wire.token_id, output_index=wire.output_index, sample_index=wire.sample_index
    )


def commit_answer_to_wire(answer: Acknowledged | HandoffAborted) -> handoff_pb2.CommitResponse:
    """Encodes the end of a hand-off."""
    if isinstance(answer, Acknowledged):
        return handoff_pb2.CommitResponse(acknowledged=handoff_pb2.Acknowledged())
    aborted = handoff_pb2.HandoffAborted(
        detail=answer.detail, reason=_REASON_TO_WIRE[answer.reason]
    )
    return handoff_pb2.CommitResponse(aborted=aborted)


def commit_answer_from_wire(
    wire: handoff_pb2.CommitResponse,
) -> Acknowledged | HandoffAborted | CallFailed:
    """Decodes the end of a hand-off; an answer without an outcome counts as failed."""
    match wire.WhichOneof("outcome"):
        case "acknowledged":
            return Acknowledged()
        case "aborted":
            reason = _REASON_FROM_WIRE[wire.aborted.reason]
            return HandoffAborted(detail=wire.aborted.detail, reason=reason)
        case _:
            return CallFailed(detail="an answer without an outcome")


def call_failed_from_wire(wire: rank_pb2.RankError) -> CallFailed:
    """Decodes the failure of a call to a peer."""
    return CallFailed(
        detail=f"{wire.reason}: {wire.message}", is_unreachable=wire.code == _UNAVAILABLE
    )


def links_to_wire(links: Iterable[LinkStatus]) -> list[inference_pb2.LinkInfo]:
    """Encodes live links for status pages."""
    return [
        inference_pb2.LinkInfo(
            peer_worker_id=link.peer_worker_id,
            transport=link.transport,
            bytes_sent=link.bytes_sent,
            bytes_received=link.bytes_received,
            frames_in_flight=link.frames_in_flight,
            epoch=link.epoch,
        )
        for link in links
    ]
