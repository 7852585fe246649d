"""Whether a router that was started serves, and has found everybody."""

import grpc

from pdserve.config.cluster import ClusterConfig
from pdserve.rpc.server import channel_options
from pdserve.rpc.v1 import inference_pb2, inference_pb2_grpc

_TIMEOUT_S = 1.0


def router_sees_all(port: int, config: ClusterConfig) -> bool:
    """Asks the router for its fronts and workers; False while it does not answer."""
    # A new channel each time: one that was refused backs off.
    address = f"{config.host}:{port}"
    with grpc.insecure_channel(address, options=channel_options()) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        try:
            info = stub.GetServerInfo(inference_pb2.GetServerInfoRequest(), timeout=_TIMEOUT_S)
        except grpc.RpcError:
            return False
    has_fronts = max(info.num_fronts, 1) >= config.fronts
    has_prefill = info.num_prefill >= config.num_prefill
    return has_fronts and has_prefill and info.num_decode >= config.num_decode
