"""Carries typed errors across the socket between face and rank."""

from pdserve.errors import InvalidField, PdserveError
from pdserve.rpc.status import error_from_parts
from pdserve.rpc.v1 import rank_pb2


def error_to_wire(error: PdserveError) -> rank_pb2.RankError:
    """Encodes an error."""
    field = error.field if isinstance(error, InvalidField) else ""
    return rank_pb2.RankError(
        code=error.grpc_code, reason=error.reason, message=str(error), field=field
    )


def error_from_wire(wire: rank_pb2.RankError) -> PdserveError:
    """Decodes an error."""
    return error_from_parts(
        code=wire.code, reason=wire.reason, message=wire.message, field=wire.field
    )
