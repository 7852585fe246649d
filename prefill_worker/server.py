"""The face of a prefill worker."""

from pdserve.config.worker import WorkerConfig
from pdserve.face.main import run_worker
from pdserve.face.rank_process import RankProcess
from pdserve.rpc.server import RpcServer
from pdserve.rpc.v1 import worker_pb2


def run(config: WorkerConfig) -> int:
    """Runs one prefill replica until it is drained or lost; returns the exit status."""
    services = (worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name,)
    return run_worker(config, "prefill_worker.rank", services, _add_services)


def _add_services(server: RpcServer, rank: RankProcess, config: WorkerConfig) -> None:
    """A prefill worker serves routers only; it calls decode workers."""
