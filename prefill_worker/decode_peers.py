"""Decode workers as a prefill rank sees them: what they answer, and where their links are."""

from kv_transfer import codec
from kv_transfer.prefill_actions import ReportRefused
from kv_transfer.protocol import (
    Acknowledged,
    CallFailed,
    DecodeTarget,
    Grant,
    HandoffAborted,
    LinkEndpoint,
    Refusal,
    RefusalReason,
)
from kv_transfer.transport import LinkPeer
from pdserve.errors import PdserveError, TooLong, TransferError
from pdserve.request import Request
from pdserve.rpc.v1 import rank_pb2


def reserve_answer(reply: rank_pb2.PeerReply) -> Grant | Refusal | CallFailed:
    """Decodes the answer to a Reserve call."""
    if reply.HasField("error"):
        return codec.call_failed_from_wire(reply.error)
    try:
        return codec.reserve_answer_from_wire(reply.reserve)
    except ValueError as error:
        return CallFailed(detail=str(error))


def commit_answer(reply: rank_pb2.PeerReply) -> Acknowledged | HandoffAborted | CallFailed:
    """Decodes the answer to a Commit call."""
    if reply.HasField("error"):
        return codec.call_failed_from_wire(reply.error)
    try:
        return codec.commit_answer_from_wire(reply.commit)
    except ValueError as error:
        return CallFailed(detail=str(error))


def refusal_error(request: Request, action: ReportRefused) -> PdserveError:
    """Returns what a client is told of a request that decode refused for good."""
    if action.reason is RefusalReason.TOO_LARGE:
        return TooLong(
            "token_ids", len(request.token_ids), f"what a decode worker can hold ({action.detail})"
        )
    state = f"it was offered ({action.reason.value}: {action.detail})"
    return TransferError(request.handoff_id, "decode", state, retry_is_safe=False)


def peer_of(target: DecodeTarget, endpoint: LinkEndpoint, rank: int) -> LinkPeer:
    """Returns a rank of a decode worker as links see it."""
    return LinkPeer(
        worker_id=target.worker_id,
        incarnation=target.incarnation,
        endpoint=endpoint,
        rank=rank,
    )
