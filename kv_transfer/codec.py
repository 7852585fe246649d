"""Turns the hand-off's words into protobuf messages (`handoff.proto`) and back.

Decoders raise ValueError on a message that lacks what the protocol needs.
"""

from collections.abc import Iterable

from kv_transfer.protocol import (
    Acknowledged,
    CallFailed,
    DecodeTarget,
    Envelope,
    FirstToken,
    Grant,
    HandoffAborted,
    LinkEndpoint,
    Refusal,
    RefusalReason,
    SampledAhead,
)
from kv_transfer.transport import LinkStatus
from pdserve.config.shape import KvShape
from pdserve.request import HandoffId, Incarnation, Request, ReservationId, WorkerId
from pdserve.rpc.codec import request_to_wire
from pdserve.rpc.v1 import handoff_pb2, inference_pb2, link_pb2, rank_pb2, worker_pb2

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


def target_to_wire(target: DecodeTarget) -> worker_pb2.DecodeTarget:
    """Encodes a decode target."""
    return worker_pb2.DecodeTarget(
        worker_id=target.worker_id,
        incarnation=target.incarnation,
        address=target.address,
        decode_attempt=target.decode_attempt,
    )


def target_from_wire(wire: worker_pb2.DecodeTarget) -> DecodeTarget:
    """Decodes a decode target."""
    return DecodeTarget(
        worker_id=WorkerId(wire.worker_id),
        incarnation=Incarnation(wire.incarnation),
        address=wire.address,
        decode_attempt=wire.decode_attempt,
    )


def shape_to_wire(shape: KvShape) -> handoff_pb2.KvShape:
    """Encodes what may differ between two workers' KV."""
    return handoff_pb2.KvShape(
        tensor_parallel=shape.tensor_parallel,
        pipeline_parallel=shape.pipeline_parallel,
        block_size=shape.block_size,
        dtype=shape.dtype,
    )


def shape_from_wire(wire: handoff_pb2.KvShape) -> KvShape:
    """Decodes what may differ between two workers' KV."""
    return KvShape(
        tensor_parallel=wire.tensor_parallel,
        pipeline_parallel=wire.pipeline_parallel,
        block_size=wire.block_size,
        dtype=wire.dtype,
    )


def endpoint_to_wire(endpoint: LinkEndpoint) -> handoff_pb2.LinkEndpoint:
    """Encodes where a rank listens for links."""
    return handoff_pb2.LinkEndpoint(host=endpoint.host, port=endpoint.port, token=endpoint.token)


def endpoint_from_wire(wire: handoff_pb2.LinkEndpoint) -> LinkEndpoint:
    """Decodes where a rank listens for links."""
    return LinkEndpoint(host=wire.host, port=wire.port, token=wire.token)


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
        prefill_shape=shape_to_wire(envelope.prefill_shape),
    )


def envelope_from_wire(wire: handoff_pb2.Envelope) -> Envelope:
    """Decodes an envelope."""
    return Envelope(
        handoff_id=HandoffId(wire.handoff_id),
        attempt=wire.attempt,
        decode_attempt=wire.decode_attempt,
        prefill_worker_id=WorkerId(wire.prefill_worker_id),
        prefill_incarnation=Incarnation(wire.prefill_incarnation),
        decode_worker_id=WorkerId(wire.decode_worker_id),
        decode_incarnation=Incarnation(wire.decode_incarnation),
        reservation_id=ReservationId(wire.reservation_id) if wire.reservation_id else None,
        tenant_salt_digest=wire.tenant_salt_digest,
        compatibility_digest=wire.compatibility_digest,
        prefill_shape=shape_from_wire(wire.prefill_shape),
    )


def first_token_to_wire(token: FirstToken) -> handoff_pb2.FirstToken:
    """Encodes the token sampled at prefill."""
    return handoff_pb2.FirstToken(
        sample_index=token.sample_index, output_index=token.output_index, token_id=token.token_id
    )


def first_token_from_wire(wire: handoff_pb2.FirstToken) -> FirstToken:
    """Decodes the token sampled at prefill."""
    return FirstToken(
        sample_index=wire.sample_index, output_index=wire.output_index, token_id=wire.token_id
    )


def reserve_answer_to_wire(answer: Grant | Refusal) -> handoff_pb2.ReserveResponse:
    """Encodes the answer to a Reserve call."""
    if isinstance(answer, Refusal):
        refusal = handoff_pb2.Refusal(
            reason=_REASON_TO_WIRE[answer.reason],
            detail=answer.detail,
            retry_after_s=answer.retry_after_s,
        )
        return handoff_pb2.ReserveResponse(refusal=refusal)
    grant = handoff_pb2.Grant(
        reservation_id=answer.reservation_id,
        num_cached_tokens=answer.num_cached_tokens,
        manifest_digest=answer.manifest_digest,
        links=[endpoint_to_wire(link) for link in answer.links],
        lease_s=answer.lease_s,
        frame_tokens=answer.frame_tokens,
        frame_layers=answer.frame_layers,
        decode_shape=shape_to_wire(answer.decode_shape),
        wire_dtype=answer.wire_dtype,
    )
    return handoff_pb2.ReserveResponse(grant=grant)


def reserve_answer_from_wire(wire: handoff_pb2.ReserveResponse) -> Grant | Refusal:
    """Decodes the answer to a Reserve call."""
    kind = wire.WhichOneof("outcome")
    if kind == "refusal":
        return Refusal(
            reason=_reason_from_wire(wire.refusal.reason),
            detail=wire.refusal.detail,
            retry_after_s=wire.refusal.retry_after_s,
        )
    if kind != "grant":
        raise ValueError("a ReserveResponse without an outcome")
    grant = wire.grant
    return Grant(
        reservation_id=ReservationId(grant.reservation_id),
        num_cached_tokens=grant.num_cached_tokens,
        manifest_digest=grant.manifest_digest,
        links=tuple(endpoint_from_wire(link) for link in grant.links),
        lease_s=grant.lease_s,
        frame_tokens=grant.frame_tokens,
        frame_layers=grant.frame_layers if grant.HasField("frame_layers") else None,
        decode_shape=shape_from_wire(grant.decode_shape),
        wire_dtype=grant.wire_dtype,
    )


def commit_answer_to_wire(answer: Acknowledged | HandoffAborted) -> handoff_pb2.CommitResponse:
    """Encodes the answer to a Commit call."""
    if isinstance(answer, Acknowledged):
        return handoff_pb2.CommitResponse(acknowledged=handoff_pb2.Acknowledged())
    aborted = handoff_pb2.HandoffAborted(
        detail=answer.detail, reason=_REASON_TO_WIRE[answer.reason]
    )
    return handoff_pb2.CommitResponse(aborted=aborted)


def commit_answer_from_wire(wire: handoff_pb2.CommitResponse) -> Acknowledged | HandoffAborted:
    """Decodes the answer to a Commit call."""
    kind = wire.WhichOneof("outcome")
    if kind == "acknowledged":
        return Acknowledged()
    if kind != "aborted":
        raise ValueError("a CommitResponse without an outcome")
    return HandoffAborted(detail=wire.aborted.detail, reason=_reason_from_wire(wire.aborted.reason))


def _reason_from_wire(wire: handoff_pb2.Refusal.Reason.ValueType) -> RefusalReason:
    """Decodes a reason; one that this version does not know is as final as a stale attempt."""
    return _REASON_FROM_WIRE.get(wire, RefusalReason.STALE)


def reserve_to_wire(envelope: Envelope, request: Request) -> handoff_pb2.ReserveRequest:
    """Encodes a Reserve call."""
    return handoff_pb2.ReserveRequest(
        envelope=envelope_to_wire(envelope), request=request_to_wire(request)
    )


def commit_to_wire(
    envelope: Envelope, tokens: Iterable[FirstToken], manifest_digest: bytes
) -> handoff_pb2.CommitRequest:
    """Encodes a Commit call."""
    return handoff_pb2.CommitRequest(
        envelope=envelope_to_wire(envelope),
        first_tokens=[first_token_to_wire(token) for token in tokens],
        manifest_digest=manifest_digest,
    )


def sampled_to_wire(words: SampledAhead) -> link_pb2.TokensSampled:
    """Encodes first tokens that are told ahead of their commit."""
    return link_pb2.TokensSampled(
        reservation_id=words.reservation_id,
        manifest_digest=words.manifest_digest,
        output_index=words.first_tokens[0].output_index,
        sample_indices=[token.sample_index for token in words.first_tokens],
        token_ids=[token.token_id for token in words.first_tokens],
    )


def sampled_from_wire(wire: link_pb2.TokensSampled) -> SampledAhead:
    """Decodes first tokens that are told ahead of their commit.

    Raises:
        ValueError: there are none, or not one for each sample.
    """
    if not wire.token_ids or len(wire.token_ids) != len(wire.sample_indices):
        raise ValueError(
            f"{len(wire.token_ids)} first tokens of {len(wire.sample_indices)} samples were told"
        )
    return SampledAhead(
        reservation_id=ReservationId(wire.reservation_id),
        manifest_digest=wire.manifest_digest,
        first_tokens=tuple(
            FirstToken(token_id=token_id, output_index=wire.output_index, sample_index=index)
            for token_id, index in zip(wire.token_ids, wire.sample_indices, strict=True)
        ),
    )


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
            failures=link.failures,
        )
        for link in links
    ]
