"""`pdserve status`: pools, load, KV use, links and process ids, as the router sees them."""

import json
from collections.abc import Iterable
from typing import Annotated

import grpc
import typer
from rich.console import Console
from rich.table import Table

from launcher.client import bearer, client_error, open_sync_channel
from launcher.commands.generate import DEFAULT_ADDRESS, Address, ApiKey
from launcher.tables import make_table, open_console
from pdserve.rpc.v1 import inference_pb2, inference_pb2_grpc
from router.run_settings import BRAIN

_TIMEOUT_S = 10.0
GONE = "gone"
"""State of a worker that ended and has not come back."""
_UNKNOWN = "unknown"
_UNHEARD = (_UNKNOWN, "silent", "away")
"""States of a process that did not answer."""


def status(
    address: Address = DEFAULT_ADDRESS,
    api_key: ApiKey = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Show the cluster behind a router."""
    with open_sync_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        try:
            key, limit_s = bearer(api_key), _TIMEOUT_S
            asked = inference_pb2.GetServerInfoRequest(accepts_partial=True)
            info = stub.GetServerInfo(asked, limit_s, key)
            model = stub.GetModelInfo(inference_pb2.GetModelInfoRequest(), limit_s, key)
            loads = stub.GetLoads(inference_pb2.GetLoadsRequest(), limit_s, key)
        except grpc.RpcError as error:
            raise client_error(error, address) from error
    if as_json:
        typer.echo(json.dumps(to_dict(address, info, model, loads)))
        return 0
    show(address, info, model, loads, open_console())
    return 0


def show(
    address: str,
    info: inference_pb2.GetServerInfoResponse,
    model: inference_pb2.GetModelInfoResponse,
    loads: inference_pb2.GetLoadsResponse,
    console: Console,
) -> None:
    """Prints the three answers as lines and tables."""
    console.print(
        f"pdserve {info.version} at {address}, up {info.uptime_s:.0f} s, model {model.model} "
        f"({model.architecture}, up to {model.max_model_len} tokens); "
        f"{info.requests_in_flight} requests in flight, {info.requests_queued} queued",
        soft_wrap=True,
    )
    if info.is_partial:
        console.print(tell_partial(info), soft_wrap=True)
    console.print(processes_table(info.processes))
    console.print(workers_table(loads.workers))


def tell_partial(info: inference_pb2.GetServerInfoResponse) -> str:
    """Says what is not known while the brain of several fronts cannot be asked."""
    states = {process.name: process.state for process in info.processes}
    answered = ", ".join(name for name, state in states.items() if state not in _UNHEARD)
    return (
        f"the brain is {states[BRAIN]}: new requests wait for it. Requests are those of {answered} "
        "alone, for other fronts cannot be asked; workers are as they say now"
    )


def to_dict(
    address: str,
    info: inference_pb2.GetServerInfoResponse,
    model: inference_pb2.GetModelInfoResponse,
    loads: inference_pb2.GetLoadsResponse,
) -> dict[str, object]:
    """Shapes the three answers for JSON."""
    return {
        "address": address,
        "version": info.version,
        "uptime_s": info.uptime_s,
        "model": model.model,
        "dtype": model.dtype,
        "block_size": model.block_size,
        "max_model_len": model.max_model_len,
        "num_prefill": info.num_prefill,
        "num_decode": info.num_decode,
        "requests_in_flight": info.requests_in_flight,
        "requests_queued": info.requests_queued,
        "is_partial": info.is_partial,
        "router": [process_to_dict(process) for process in info.processes],
        "workers": [worker_to_dict(worker) for worker in loads.workers],
    }


def process_to_dict(process: inference_pb2.RouterProcess) -> dict[str, object]:
    """Shapes a front, or the brain, for JSON."""
    return {
        "name": process.name,
        "state": process.state,
        "pid": process.pid,
        "uptime_s": process.uptime_s,
        "requests_in_flight": process.requests_in_flight,
        "requests_queued": process.requests_queued,
        "unheard_s": process.unheard_s if process.HasField("unheard_s") else None,
    }


def processes_table(processes: Iterable[inference_pb2.RouterProcess]) -> Table:
    """Draws one line per process of the router: its fronts, and the brain that they share."""
    rows = []
    for process in processes:
        age = f" for {process.unheard_s:.0f} s" if process.HasField("unheard_s") else ""
        has_answered = process.state not in _UNHEARD
        has_requests = has_answered and process.name != BRAIN
        rows.append(
            (
                process.name,
                process.state + age,
                str(process.pid or ""),
                f"{process.uptime_s:.0f} s" if has_answered else "",
                str(process.requests_in_flight) if has_requests else "",
                str(process.requests_queued) if has_requests else "",
            )
        )
    return make_table(("router", "state", "pid", "up", "in-flight", "queued"), rows, num_names=2)


def worker_to_dict(worker: inference_pb2.WorkerInfo) -> dict[str, object]:
    """Shapes one worker for JSON."""
    load = worker.load
    return {
        "worker_id": worker.worker_id,
        "role": worker.role,
        "state": worker.state,
        "address": worker.address,
        "incarnation": f"{worker.incarnation:016x}",
        "face_pid": worker.face_pid,
        "rank_pids": list(worker.rank_pids),
        "ranks": [
            {"rank": rank.rank, "stage": rank.stage, "node": rank.node, "pid": rank.pid}
            for rank in worker.ranks
        ],
        "num_waiting": load.num_waiting,
        "num_running": load.num_running,
        "queued_tokens": load.queued_tokens,
        "total_blocks": load.total_blocks,
        "free_blocks": load.free_blocks,
        "cached_blocks": load.cached_blocks,
        "reserved_blocks": load.reserved_blocks,
        "active_blocks": load.active_blocks,
        "links": [
            {
                "peer_worker_id": link.peer_worker_id,
                "transport": link.transport,
                "bytes_sent": link.bytes_sent,
                "bytes_received": link.bytes_received,
                "frames_in_flight": link.frames_in_flight,
                "epoch": link.epoch,
                "failures": list(link.failures),
            }
            for link in worker.links
        ],
    }


def workers_table(workers: Iterable[inference_pb2.WorkerInfo]) -> Table:
    """Draws one line per worker."""
    headers = (
        "worker",
        "role",
        "state",
        "face pid",
        "ranks: node, pids",
        "waiting",
        "running",
        "KV blocks used",
        "links",
    )
    rows = []
    for worker in workers:
        load = worker.load
        used = load.active_blocks + load.reserved_blocks
        figures = (
            str(load.num_waiting),
            str(load.num_running),
            f"{used} of {load.total_blocks} ({load.cached_blocks} cached)",
        )
        links = [
            f"{link.peer_worker_id} {link.transport} "
            f"{(link.bytes_sent + link.bytes_received) / 2**20:.1f} MiB"
            + "".join(f" ({failure})" for failure in link.failures)
            for link in worker.links
        ]
        rows.append(
            (
                worker.worker_id,
                worker.role,
                "gone, or restarting" if worker.state == GONE else worker.state,
                str(worker.face_pid or ""),
                show_ranks(worker.ranks),
                *(figures if worker.HasField("load") else ("" for _ in figures)),
                "\n".join(links),
            )
        )
    return make_table(headers, rows, num_names=len(headers))


def show_ranks(ranks: Iterable[inference_pb2.RankInfo]) -> str:
    """Returns the process ids of ranks in their order, a line for each node."""
    by_node: dict[str, list[str]] = {}
    for rank in ranks:
        by_node.setdefault(rank.node, []).append(str(rank.pid))
    return "\n".join(f"{node} {' '.join(pids)}" for node, pids in by_node.items())
