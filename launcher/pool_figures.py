"""What an autoscaler sees of a cluster that this process launched: its members, and its router."""

from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import grpc

from autoscaler.figures import Reading, Traffic, WorkerFigures
from launcher.client import bearer, open_sync_channel
from launcher.pool import Member
from pdserve.config.cluster import ClusterConfig
from pdserve.request import Incarnation, Role
from pdserve.rpc.v1 import inference_pb2, inference_pb2_grpc
from router.sample_intake import samples_from_wire
from router.tenants import parse_api_key, parse_key_lines

_TIMEOUT_S = 2.0


class HasMembers(Protocol):
    """Whoever knows the replicas."""

    def members(self) -> tuple[Member, ...]:
        """Returns all replicas with their pids and records."""
        ...


class ClusterFigures:
    """Asks the router once a reading; one that does not answer leaves the reading without traffic.

    One thread reads.
    """

    def __init__(self, cluster: HasMembers, config: ClusterConfig, address: str) -> None:
        """Opens a channel to the router."""
        self._cluster = cluster
        self._config = config
        self._key = bearer(find_key(config))
        self._channel = open_sync_channel(address)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._channel.close()

    def read(self) -> Reading:
        """Returns all that is known now."""
        infos: dict[str, inference_pb2.WorkerInfo] = {}
        traffic: Traffic | None = None
        try:
            server = self._stub.GetServerInfo(
                inference_pb2.GetServerInfoRequest(), timeout=_TIMEOUT_S, metadata=self._key
            )
            loads = self._stub.GetLoads(
                inference_pb2.GetLoadsRequest(), timeout=_TIMEOUT_S, metadata=self._key
            )
        except grpc.RpcError:
            pass
        else:
            infos = {info.worker_id: info for info in loads.workers}
            traffic = to_traffic(server)
        return Reading(
            workers=tuple(self._to_figures(one, infos) for one in self._cluster.members()),
            traffic=traffic,
        )

    def _to_figures(
        self, member: Member, infos: dict[str, inference_pb2.WorkerInfo]
    ) -> WorkerFigures:
        config = self._config
        engine = config.decode_engine if member.role is Role.DECODE else config.engine
        info = infos.get(member.worker_id, inference_pb2.WorkerInfo())
        load, record = info.load, member.record
        return WorkerFigures(
            worker_id=member.worker_id,
            role=member.role,
            is_serving=record is not None and record.state == "ready" and not member.is_draining,
            is_draining=member.is_draining,
            worker_class="" if record is None else record.worker_class,
            queued_tokens=load.queued_tokens,
            num_waiting=load.num_waiting,
            num_running=load.num_running,
            num_held=info.ledger.held_handoffs,
            used_blocks=load.active_blocks + load.reserved_blocks,
            total_blocks=load.total_blocks or (0 if record is None else record.total_blocks),
            block_size=engine.block_size,
            max_num_seqs=engine.max_num_seqs,
            chunk_tokens=engine.max_num_batched_tokens,
            life=Incarnation(info.incarnation) if info.HasField("load") else None,
            report=load.report,
            samples=samples_from_wire(load.samples),
        )


def to_traffic(info: inference_pb2.GetServerInfoResponse) -> Traffic:
    """Reads what one router has seen."""
    return Traffic(
        num_arrived=info.requests_arrived,
        prompt_tokens=info.prompt_tokens,
        output_tokens=info.output_tokens,
        num_waiting=info.requests_queued,
        waiting_tokens=info.waiting_tokens,
        oldest_s=info.oldest_wait_s,
        num_in_flight=info.requests_in_flight,
    )


def find_key(config: ClusterConfig) -> str | None:
    """Returns a key that the router knows; None when it asks for none."""
    if config.api_keys:
        return parse_api_key(config.api_keys[0])[1]
    if config.api_keys_file is None:
        return None
    path = Path(config.api_keys_file)
    return next(
        (
            key
            for _, key in parse_key_lines(path.read_text(encoding="utf-8").splitlines(), str(path))
        ),
        None,
    )
