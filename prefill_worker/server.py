"""The face of a prefill worker."""

from pdserve.config.worker import WorkerConfig
from pdserve.face.main import run_worker
from pdserve.face.rank_process import RankProcess
from pdserve.face.services import FaceServices
from pdserve.request import Role
from pdserve.rpc.server import RpcServer
from pdserve.rpc.v1 import worker_pb2


def run(config: WorkerConfig) -> int:
    """Runs one prefill replica until it is drained or lost; returns the exit status."""
    return run_worker(config, "prefill_worker.rank", {Role.PREFILL: services()})


def services() -> FaceServices:
    """Returns what a prefill worker serves."""
    names = (worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name,)
    return FaceServices(names=names, add=_add_services)


def _add_services(server: RpcServer, rank: RankProcess, config: WorkerConfig) -> None:
    """A prefill worker serves routers only; it calls decode workers."""
