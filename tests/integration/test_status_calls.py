"""What tells of a running cluster: loads, server info, health, reflection."""

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pdserve.rpc.server import open_channel
from pdserve.rpc.v1 import inference_pb2
from pdserve.version import VERSION
from tests.support.cluster import ClusterHarness, running_cluster, wait_until_async
from tests.support.models import tiny_llama_folder  # noqa: F401

SERVING, NOT_SERVING = 1, 2
SERVICE = "pdserve.rpc.v1.Inference"
PROMPT = tuple(range(10, 110))


@pytest.fixture(scope="module")
def cluster(tiny_llama_folder: Path) -> Iterator[ClusterHarness]:  # noqa: F811
    with running_cluster(tiny_llama_folder) as harness:
        yield harness


async def test_loads_info_health_and_reflection_tell_of_the_cluster(
    cluster: ClusterHarness,
) -> None:
    async with cluster.connect() as client, open_channel(cluster.cluster.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", SERVICE):
            asked = health_pb2.HealthCheckRequest(service=name)

            # Health follows the pools a moment later.
            async def is_serving(asked: health_pb2.HealthCheckRequest = asked) -> bool:
                return bool((await health.Check(asked, timeout=5)).status == SERVING)

            await wait_until_async(is_serving, 10.0, f"health of {name!r}")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health.Check(health_pb2.HealthCheckRequest(service="other"), timeout=5)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND

        for number in range(2):
            await client.generate(prompt_ids=[number + 3, *PROMPT], max_tokens=3, ignore_eos=True)

        # What workers say is a heartbeat old.
        async def is_counted() -> bool:
            loads = await client.loads()
            sent, received = loads["prefill-0"].links, loads["decode-0"].links
            has_cached = all(worker.load.cached_blocks > 0 for worker in loads.values())
            return has_cached and sent[0].bytes_sent == received[0].bytes_received

        await wait_until_async(is_counted, 10.0, "both ends count the same")
        loads = await client.loads()
        assert {name: worker.role for name, worker in loads.items()} == {
            "prefill-0": "prefill",
            "decode-0": "decode",
        }
        for member in cluster.cluster.members():
            worker = loads[member.worker_id]
            assert member.record is not None
            assert worker.address == member.record.address
            assert worker.incarnation == member.record.incarnation
            assert (worker.state, worker.face_pid) == ("ready", member.face_pid)
        (sent,), (received,) = loads["prefill-0"].links, loads["decode-0"].links
        assert (sent.peer_worker_id, received.peer_worker_id) == ("decode-0", "prefill-0")
        assert sent.bytes_sent > 0

        info = await client.stub.GetServerInfo(inference_pb2.GetServerInfoRequest(), timeout=5)
        assert (info.version, info.num_prefill, info.num_decode) == (VERSION, 1, 1)
        assert (info.requests_in_flight, info.requests_queued) == (0, 0)
        model = await client.stub.GetModelInfo(inference_pb2.GetModelInfoRequest(), timeout=5)
        assert (model.model, model.architecture, model.dtype) == ("tiny", "llama", "float32")
        assert (model.vocab_size, model.block_size, model.max_logprobs) == (384, 16, 20)
        assert (list(model.eos_token_ids), model.has_chat_template) == ([2], True)
        assert model.revision

        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([ask]), timeout=5
        )
        answers = [one.list_services_response async for one in call]
        assert SERVICE in {service.name for service in answers[0].service}


async def test_health_is_watched_down_and_up_again_when_a_pool_dies(
    cluster: ClusterHarness,
) -> None:
    async with open_channel(cluster.cluster.address) as channel:
        asked = health_pb2.HealthCheckRequest(service=SERVICE)
        watch = health_pb2_grpc.HealthStub(channel).Watch(asked, timeout=60)
        assert (await watch.read()).status == SERVING
        cluster.cluster.kill("decode-0")
        assert (await watch.read()).status == NOT_SERVING
        assert (await watch.read()).status == SERVING
        watch.cancel()
