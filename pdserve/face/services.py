"""What a role serves beside what every worker does."""

from collections.abc import Callable
from dataclasses import dataclass

from pdserve.config.worker import WorkerConfig
from pdserve.face.rank_process import RankProcess
from pdserve.rpc.server import RpcServer

AddServices = Callable[[RpcServer, RankProcess, WorkerConfig], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class FaceServices:
    """The gRPC services of a role."""

    names: tuple[str, ...]
    """Full names of all of them, for health and reflection."""
    add: AddServices
    """Adds those of its own to the server."""
