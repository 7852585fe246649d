"""What decode workers answer to calls, as the hand-off takes it."""

from kv_transfer import codec
from kv_transfer.protocol import Acknowledged, CallFailed, Grant, HandoffAborted, Refusal
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
