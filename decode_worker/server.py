"""The face of a decode worker."""

from decode_worker.handoff_service import HandoffService
from pdserve.config.worker import WorkerConfig
from pdserve.face.main import run_worker
from pdserve.face.rank_process import RankProcess
from pdserve.face.services import FaceServices
from pdserve.request import Role
from pdserve.rpc.server import RpcServer
from pdserve.rpc.v1 import handoff_pb2, handoff_pb2_grpc, worker_pb2


def run(config: WorkerConfig) -> int:
    """Runs one decode replica until it is drained or lost; returns the exit status."""
    return run_worker(config, "decode_worker.rank", {Role.DECODE: services()})


def services() -> FaceServices:
    """Returns what a decode worker serves."""
    names = (
        worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name,
        handoff_pb2.DESCRIPTOR.services_by_name["Handoff"].full_name,
    )
    return FaceServices(names=names, add=_add_services)


def _add_services(server: RpcServer, rank: RankProcess, config: WorkerConfig) -> None:
    handoff = config.handoff
    land_timeout_s = handoff.frame_timeout_s + handoff.call_timeout_s
    service = HandoffService(rank, handoff.call_timeout_s, land_timeout_s)
    handoff_pb2_grpc.add_HandoffServicer_to_server(service, server.grpc_server)
