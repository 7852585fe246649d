"""What an autoscaler sees of a cluster: its members, and its routers."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import grpc

from autoscaler.figures import Reading, Traffic, WorkerFigures
from launcher.client import bearer, open_sync_channel
from launcher.pool import Member
from launcher.traffic_sum import TrafficSum
from pdserve.config.cluster import ClusterConfig
from pdserve.errors import PdserveError
from pdserve.request import Incarnation
from pdserve.rpc.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from router.sample_intake import samples_from_wire
from router.tenants import parse_api_key, parse_key_lines

_TIMEOUT_S = 2.0


class Watched(Protocol):
    """Whoever knows the replicas and the routers."""

    def members(self) -> tuple[Member, ...]:
        """Returns all replicas with their records.

        Raises:
            PdserveError: it cannot say now.
        """
        ...

    def router_addresses(self) -> tuple[str, ...]:
        """Returns host:port of each router.

        Raises:
            PdserveError: it cannot say now.
        """
        ...


class ClusterFigures:
    """Asks all routers once a reading; without an answer the reading has no traffic.

    One thread reads.
    """

    def __init__(self, cluster: Watched, api_key: str | None) -> None:
        """Asks nobody yet."""
        self._cluster = cluster
        self._key = bearer(api_key)
        self._channels: dict[str, grpc.Channel] = {}
        self._sum = TrafficSum()
        self._seen: dict[str, types_pb2.SeenReport] = {}
        """The last report of each worker."""
        self._members: tuple[Member, ...] = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for channel in self._channels.values():
            channel.close()

    def read(self) -> Reading:
        """Returns all that is known now."""
        try:
            self._members = self._cluster.members()
            addresses = self._cluster.router_addresses()
        except PdserveError:
            # Nothing is decided by what may have changed since.
            return Reading(workers=self._workers({}), traffic=None)
        answers = {}
        infos: dict[str, inference_pb2.WorkerInfo] | None = None
        for address, stub in self._stubs(addresses):
            try:
                server = stub.GetServerInfo(
                    inference_pb2.GetServerInfoRequest(), timeout=_TIMEOUT_S, metadata=self._key
                )
                if infos is None:
                    # Each router asks all workers for their figures: one of them is enough.
                    loads = stub.GetLoads(
                        inference_pb2.GetLoadsRequest(wants_past_samples=True, seen=self._seen),
                        timeout=_TIMEOUT_S,
                        metadata=self._key,
                    )
                    infos = {info.worker_id: info for info in loads.workers}
                    self._note_seen(infos)
            except grpc.RpcError:
                continue
            answers[address] = to_traffic(server)
        traffic = None if infos is None else self._sum.add(answers)
        return Reading(workers=self._workers(infos or {}), traffic=traffic)

    def _note_seen(self, infos: dict[str, inference_pb2.WorkerInfo]) -> None:
        """Remembers which reports came: next time all later ones are asked for."""
        for name, info in infos.items():
            if info.load.report:
                self._seen[name] = types_pb2.SeenReport(
                    incarnation=info.incarnation, report=info.load.report
                )
        self._seen = {name: one for name, one in self._seen.items() if name in infos}

    def _stubs(
        self, addresses: Sequence[str]
    ) -> Sequence[tuple[str, inference_pb2_grpc.InferenceStub]]:
        for address in set(self._channels) - set(addresses):
            self._channels.pop(address).close()
        for address in addresses:
            if address not in self._channels:
                self._channels[address] = open_sync_channel(address)
        return [
            (address, inference_pb2_grpc.InferenceStub(self._channels[address]))
            for address in addresses
        ]

    def _workers(self, infos: dict[str, inference_pb2.WorkerInfo]) -> tuple[WorkerFigures, ...]:
        return tuple(
            to_figures(one, infos.get(one.worker_id, inference_pb2.WorkerInfo()))
            for one in self._members
        )


def to_figures(member: Member, info: inference_pb2.WorkerInfo) -> WorkerFigures:
    """Puts together what a replica registered, and what it says of its load."""
    load, record = info.load, member.record
    figures = WorkerFigures(
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
        reserved_blocks=load.reserved_blocks,
        total_blocks=load.total_blocks or (0 if record is None else record.total_blocks),
        life=Incarnation(info.incarnation) if info.HasField("load") else None,
        report=load.report,
        samples=samples_from_wire(load.samples),
    )
    if record is None:
        return figures
    return replace(
        figures,
        is_heard=info.state == "ready" and info.incarnation == record.incarnation,
        block_size=record.block_size,
        max_num_seqs=record.max_num_seqs,
        chunk_tokens=record.max_num_batched_tokens,
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
    return None if config.api_keys_file is None else read_key(Path(config.api_keys_file))


def read_key(path: Path) -> str | None:
    """Returns the first key of a file with lines of TENANT KEY."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return next((key for _, key in parse_key_lines(lines, str(path))), None)
