"""What strangers may do to a running cluster: no code runs, nothing leaks, nothing else listens."""

import asyncio
import json
import os
import pickle
import secrets
import socket
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from launcher.client import Generation
from pdserve.request import Role
from pdserve.rpc.v1 import handoff_pb2, inference_pb2, worker_pb2
from tests.support.cluster import ClusterHarness, running_cluster, wait_until, wait_until_async
from tests.support.listeners import Listener, listeners_of
from tests.support.models import tiny_llama_folder  # noqa: F401
from tests.support.oracles import Canary, assert_ledger
from tests.support.statuses import fail, try_request

PROMPT = tuple(range(10, 110))
NUM_WORKERS = 3


@pytest.fixture(scope="module")
def cluster(tiny_llama_folder: Path) -> Iterator[ClusterHarness]:  # noqa: F811
    with running_cluster(tiny_llama_folder, num_decode=2) as harness:
        yield harness


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._command = f"touch {path}"

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (self._command,)


def open_ports(harness: ClusterHarness) -> list[Listener]:
    return listeners_of(harness.cluster.pids())


async def use_every_link(harness: ClusterHarness) -> None:
    async with harness.connect() as client:
        for number in range(4):
            ids = [number + 5, *PROMPT]
            await client.generate(prompt_ids=ids, max_tokens=2, ignore_eos=True)


async def test_E1_pickles_sent_to_every_port_run_nothing(
    cluster: ClusterHarness, tmp_path: Path
) -> None:
    canary_file = tmp_path / "canary"
    bombs = [pickle.dumps(Bomb(canary_file), protocol) for protocol in (0, 2, 4, 5)]
    pickle.loads(bombs[0])
    assert canary_file.exists(), "the bomb does not work"
    canary_file.unlink()
    await use_every_link(cluster)
    async with cluster.connect() as client:
        canary = await Canary.hatch(cluster, client)
        pids = cluster.cluster.pids()
        ports = open_ports(cluster)
        assert len(ports) >= 2 + 2 * NUM_WORKERS + 1
        for port in ports:
            for bomb in bombs:
                for payload in (
                    bomb,
                    struct.pack("!I", len(bomb)) + bomb,
                    struct.pack("<Q", len(bomb)) + bomb,
                    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bomb,
                    b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(bomb) + bomb,
                ):
                    await asyncio.to_thread(throw, port, payload)
        assert not canary_file.exists()
        assert cluster.cluster.pids() == pids
        await canary.assert_alive(client)
        await assert_ledger(client, NUM_WORKERS)


def throw(port: Listener, payload: bytes) -> None:
    """Sends bytes and reads what comes back, until the server hangs up or has no more to say."""
    with socket.create_connection((port.host, port.port), timeout=5) as connection:
        connection.settimeout(0.05)
        try:
            connection.sendall(payload)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(4096):
                pass
        except OSError:
            return


async def test_E1_a_pickle_in_place_of_a_message_is_refused_by_every_service(
    cluster: ClusterHarness, tmp_path: Path
) -> None:
    bomb = pickle.dumps(Bomb(tmp_path / "canary"))
    inference = inference_pb2.DESCRIPTOR.services_by_name["Inference"]
    worker = worker_pb2.DESCRIPTOR.services_by_name["Worker"]
    handoff = handoff_pb2.DESCRIPTOR.services_by_name["Handoff"]
    calls = [(cluster.cluster.address, inference)]
    for member in cluster.cluster.members():
        assert member.record is not None
        calls.append((member.record.address, worker))
        if member.role is Role.DECODE:
            calls.append((member.record.address, handoff))
    async with cluster.connect() as client:
        canary = await Canary.hatch(cluster, client)
        for address, service in calls:
            async with grpc.aio.insecure_channel(address) as channel:
                for method in service.methods_by_name:
                    name = f"/{service.full_name}/{method}"
                    call = channel.unary_stream(name)(bomb, timeout=5)
                    assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT, name
        assert not (tmp_path / "canary").exists()
        await assert_ledger(client, NUM_WORKERS)
        assert all(member.num_restarts == 0 for member in cluster.cluster.members())
        await canary.assert_alive(client)


async def test_E2_only_declared_addresses_listen_and_all_on_loopback(
    cluster: ClusterHarness,
) -> None:
    await use_every_link(cluster)
    found = open_ports(cluster)
    assert [port for port in found if not port.is_loopback] == []
    declared = {cluster.cluster.address, cluster.cluster.metrics_address}
    assert cluster.cluster.http_address is not None
    declared.add(cluster.cluster.http_address)
    declared.add(cluster.cluster.redis_url.removeprefix("redis://").partition("/")[0])
    ranks: dict[int, str] = {}
    for member in cluster.cluster.members():
        assert member.record is not None
        declared |= {member.record.address, member.record.metrics_address}
        ranks |= dict.fromkeys(member.record.rank_pids, member.worker_id)
    async with cluster.connect() as client:

        async def counts_agree() -> bool:
            others = [port for port in open_ports(cluster) if port.address not in declared]
            listeners = Counter(ranks.get(port.pid) for port in others)
            # Decode ranks listen for new links, and both ends of a link for its own sockets.
            return listeners == {
                worker_id: len(worker.links) + (worker.role == "decode")
                for worker_id, worker in (await client.loads()).items()
            }

        # What a worker tells of its links is a heartbeat old.
        await wait_until_async(counts_agree, 15.0, "as many listeners as links")


async def test_E10_prompts_keys_and_forged_lines_are_in_no_log(cluster: ClusterHarness) -> None:
    key = f"sk-{secrets.token_hex(12)}"
    forged = '{"time": "2020", "level": "ERROR", "message": "forged-by-a-client"}'
    text = f"secret {key}\r\n{forged}\n\x1b[31mred\x1b[0m"
    start = len(cluster.lines)
    async with cluster.connect() as client:
        for fields in (
            {"text": text},
            {"chat": [("user", text)]},
            {"text": "hi", "stop": [text]},
            {"text": "hi", "model": text},
            {"text": "hi", "request_id": text},
            {"chat": [(text, "hi")]},
            {"text": text * 10_000},
        ):
            found = await try_request(client, max_tokens=2, **fields)
            refused = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
            assert isinstance(found, Generation) or found.code in refused
        await client.generate(text="last", max_tokens=1, request_id="the-last-one")
    wait_until(lambda: any("the-last-one" in line for line in cluster.lines[start:]), 15)
    written = "\n".join(cluster.lines[start:])
    assert key not in written
    assert "forged-by-a-client" not in written
    assert "\x1b" not in written


async def test_E10_an_id_of_1_MB_is_refused_and_not_repeated(cluster: ClusterHarness) -> None:
    start = len(cluster.lines)
    async with cluster.connect() as client:
        for request_id in ("x" * (1 << 20), "x" * 129, "a b", "a\nb", "é", "a/b", "\x00"):
            failure = await fail(client, text="hi", request_id=request_id)
            assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
            assert failure.fields == ("request_id",)
            assert len(failure.message) < 300
        longest = "Az09._-" * 18 + "xy"
        assert len(longest) == 128
        found = await client.generate(text="hi", max_tokens=1, request_id=longest)
        assert found.request_id == longest
    assert max((len(line) for line in cluster.lines[start:]), default=0) < 2048


async def test_each_request_has_one_json_line_in_the_routers_log(cluster: ClusterHarness) -> None:
    start = len(cluster.lines)
    async with cluster.connect() as client:
        for number in range(5):
            await client.generate(text="hello", max_tokens=3, request_id=f"line-{number}")
    names = [f"line-{number}" for number in range(5)]

    def lines_of(name: str) -> list[dict[str, object]]:
        found = []
        for line in cluster.lines[start:]:
            head, _, rest = line.partition("] ")
            if head == "[router" and rest.startswith("{"):
                entry = json.loads(rest)
                if entry.get("request_id") == name:
                    found.append(entry)
        return found

    wait_until(lambda: all(lines_of(name) for name in names), 15)
    for name in names:
        (entry,) = lines_of(name)
        assert entry["message"] == "request finished"
        assert (entry["status"], entry["output_tokens"]) == ("OK", 3)
        assert entry["prefill_worker"] == "prefill-0"
        assert entry["ttft_s"] is not None
