"""Keys and tenants over both protocols: who gets in, whose cache is hit, who may abort."""

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pdserve.errors import Cancelled, RequestNotFound, Unauthenticated
from pdserve.rpc.server import open_channel
from pdserve.rpc.status import error_from_rpc
from pdserve.rpc.v1 import inference_pb2, inference_pb2_grpc
from router.auth import OPEN_METHODS, OPEN_PATHS
from tests.support.http_client import CHAT, add_pair, http_client
from tests.support.router_harness import PROMPT, eventually, request_for, run_cluster

KEYS = {"alice": "key-a", "bob": "key-b"}
TEXT = {"prompt": list(PROMPT), "max_tokens": 2}
PATHS = {
    "/v1/chat/completions": "POST",
    "/v1/completions": "POST",
    "/tokenize": "POST",
    "/detokenize": "POST",
    "/v1/models": "GET",
    "/v1/models/tiny": "GET",
    "/health": "GET",
    "/ping": "GET",
    "/version": "GET",
    "/metrics": "GET",
    "/docs": "GET",
    "/openapi.json": "GET",
    "/": "GET",
}


@pytest.fixture
async def locked(text_folder):
    keys = tuple(f"{name}={key}" for name, key in KEYS.items())
    async with run_cluster(text_folder, api_keys=keys) as cluster:
        await add_pair(cluster)
        yield cluster


def _bearer(name: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {KEYS[name]}"),)


async def _status(call) -> grpc.StatusCode:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def test_E4_every_path_but_the_written_few_asks_for_a_key(locked):
    async with http_client(locked) as client:
        for path, method in PATHS.items():
            for headers in ({}, {"authorization": "Bearer wrong"}):
                answer = await client.request(method, path, headers=headers)
                if path in OPEN_PATHS:
                    assert answer.status_code == 200, path
                    continue
                assert answer.status_code == 401, path
                assert answer.headers["www-authenticate"] == "Bearer"
                assert answer.json()["error"]["code"] == "invalid_api_key"
        assert set(PATHS) >= OPEN_PATHS


async def test_E4_no_trick_with_a_path_opens_a_route(locked):
    async with http_client(locked) as client:
        for path in ("/health/../v1/models", "//v1/models", "/v1/models/", "/metrics/x", "/HEALTH"):
            assert (await client.get(path)).status_code == 401, path


async def test_E4_two_authorization_headers_are_refused(locked):
    good, bad = f"Bearer {KEYS['alice']}", "Bearer wrong"
    async with http_client(locked) as client:
        headers = [("authorization", good), ("authorization", bad)]
        assert (await client.get("/v1/models", headers=headers)).status_code == 401


async def test_E4_every_rpc_but_the_written_few_asks_for_a_key(locked):
    services = inference_pb2.DESCRIPTOR.services_by_name["Inference"]
    async with open_channel(f"127.0.0.1:{locked.port}") as channel:
        for method in services.methods:
            path = f"/{services.full_name}/{method.name}"
            call = channel.unary_unary if not method.server_streaming else channel.unary_stream
            request = method.input_type._concrete_class()
            stub = call(path, request_serializer=type(request).SerializeToString)
            made = stub(request)
            found = await (_status(made) if not method.server_streaming else _drain(made))
            expected = "OK" if path in OPEN_METHODS else "UNAUTHENTICATED"
            assert found.name == expected, path
        health = health_pb2_grpc.HealthStub(channel)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status
        unknown = channel.unary_unary("/pdserve.rpc.v1.Inference/Nope")
        assert await _status(unknown(b"")) is grpc.StatusCode.UNAUTHENTICATED
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        assert await _drain(reflection.ServerReflectionInfo(iter([ask]))) is (
            grpc.StatusCode.UNAUTHENTICATED
        )


async def _drain(call) -> grpc.StatusCode:
    async def read() -> None:
        async for _ in call:
            pass

    return await _status(read())


async def test_a_key_opens_both_protocols(locked):
    async with http_client(locked, KEYS["alice"]) as client:
        assert (await client.post("/v1/completions", json=TEXT)).status_code == 200
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
    messages = [m async for m in locked.stub.Generate(request_for(), metadata=_bearer("bob"))]
    assert messages[-1].HasField("completion")


async def test_the_status_of_a_wrong_key_carries_its_reason(locked):
    for metadata in (None, (("authorization", "Bearer nope"),)):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await locked.stub.GetModelInfo(inference_pb2.GetModelInfoRequest(), metadata=metadata)
        assert isinstance(error_from_rpc(caught.value), Unauthenticated)


async def test_E6_E7_the_salt_of_the_key_reaches_the_workers_and_the_body_cannot_change_it(locked):
    async def salt_of(name: str, **extra: object) -> bytes:
        async with http_client(locked, KEYS[name]) as client:
            answer = await client.post("/v1/completions", json={**TEXT, **extra})
            assert answer.status_code == 200
        worker = next(w for w in locked.network.workers.values() if w.worker_id == "p0")
        return worker.specs[-1].tenant_salt

    alice = await salt_of("alice")
    assert len(alice) == 32
    assert await salt_of("alice", user="bob", cache_salt=None) == alice
    others = [
        await salt_of("bob"),
        await salt_of("bob", user="alice"),
        await salt_of("alice", cache_salt="x"),
        await salt_of("bob", cache_salt="x"),
    ]
    assert alice not in others
    assert len(set(others)) == 3
    messages = [m async for m in locked.stub.Generate(request_for(), metadata=_bearer("alice"))]
    assert messages
    worker = next(w for w in locked.network.workers.values() if w.worker_id == "p0")
    assert worker.specs[-1].tenant_salt == alice


async def test_E7_the_router_index_knows_a_prefix_for_its_own_tenant_alone(text_folder):
    keys = tuple(f"{name}={key}" for name, key in KEYS.items())
    async with run_cluster(text_folder, api_keys=keys) as cluster:
        for name in ("p0", "p1", "d0", "d1"):
            await cluster.add(name)
        await cluster.ready(4)
        request = request_for([11 + number % 300 for number in range(300)], max_tokens=1)

        async def expected_hits(name: str) -> float:
            before = _expected(cluster)
            async for _ in cluster.stub.Generate(request, metadata=_bearer(name)):
                pass
            return _expected(cluster) - before

        assert await expected_hits("alice") == 0
        assert await expected_hits("alice") > 0
        assert await expected_hits("bob") == 0
        assert await expected_hits("bob") > 0


def _expected(cluster) -> float:
    name = "pdserve_router_expected_hit_blocks_total"
    samples = [s for f in cluster.front.metrics_registry.collect() for s in f.samples]
    return sum(sample.value for sample in samples if sample.name == name)


async def test_E12_another_tenants_request_cannot_be_aborted(text_folder):
    keys = tuple(f"{name}={key}" for name, key in KEYS.items())
    async with run_cluster(text_folder, api_keys=keys) as cluster:
        await add_pair(cluster, token_delay_s=0.01)
        request = request_for(request_id="mine", max_tokens=60)
        running = asyncio.create_task(
            _collect(cluster.stub.Generate(request, metadata=_bearer("alice")))
        )
        await eventually(lambda: cluster.front.dispatcher.num_in_flight == 1)
        for request_id in ("mine", "never-seen"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await cluster.stub.Abort(
                    inference_pb2.AbortRequest(request_id=request_id), metadata=_bearer("bob")
                )
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
            assert isinstance(error_from_rpc(caught.value), RequestNotFound)
        assert (await running)[-1].HasField("completion")
        running = asyncio.create_task(
            _collect(cluster.stub.Generate(request, metadata=_bearer("alice")))
        )
        await eventually(lambda: cluster.front.dispatcher.num_in_flight == 1)
        await cluster.stub.Abort(
            inference_pb2.AbortRequest(request_id="mine"), metadata=_bearer("alice")
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running
        assert isinstance(error_from_rpc(caught.value), Cancelled)
        await cluster.quiet()


async def _collect(call) -> list[inference_pb2.GenerateResponse]:
    return [message async for message in call]


async def test_E11_series_do_not_grow_with_names_users_ids_and_paths(locked):
    def count() -> int:
        return sum(len(f.samples) for f in locked.front.metrics_registry.collect())

    async with http_client(locked, KEYS["alice"]) as client:

        async def play(number: int) -> None:
            extra = {"user": f"u{number}", "model": f"m{number}", f"field{number}": 1}
            await client.post("/v1/completions", json={**TEXT, **extra})
            await client.post("/v1/completions", json={**TEXT, "user": f"u{number}"})
            await client.get(f"/{number}", headers={"x-request-id": f"id{number}"})
            await client.get(f"/v1/models/{number}")

        await play(0)
        before = count()
        for number in range(1, 12):
            await play(number)
        assert count() == before


@pytest.mark.parametrize(
    ("given", "is_echoed"),
    [("my-id_1.2:3", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ('"', False)],
)
async def test_E10_x_request_id_is_echoed_only_when_safe(client, given, is_echoed):
    answer = await client.get("/v1/models", headers={"x-request-id": given})
    assert (answer.headers["x-request-id"] == given) == is_echoed
    assert len(answer.headers["x-request-id"]) <= 128


async def test_C13_two_calls_may_share_an_x_request_id(client):
    headers = {"x-request-id": "same"}
    answers = await asyncio.gather(
        *(client.post("/v1/completions", json=TEXT, headers=headers) for _ in range(4))
    )
    assert [answer.status_code for answer in answers] == [200] * 4
    assert len({answer.json()["id"] for answer in answers}) == 4


async def test_E10_keys_and_prompts_are_in_no_log(locked, caplog):
    caplog.set_level("DEBUG")
    async with http_client(locked, KEYS["alice"]) as client:
        await client.post("/v1/completions", json={"prompt": "my own words", "max_tokens": 2})
        await client.post("/v1/completions", json={"prompt": "my own words", "top_p": 7})
        await client.get("/v1/models", headers={"authorization": "Bearer a-wrong-one"})
    text = "\n".join(
        str(vars(r)) for r in caplog.records if r.name.startswith(("router", "pdserve"))
    )
    for word in ("my own words", KEYS["alice"], "a-wrong-one"):
        assert word not in text


def test_stub_has_no_rpc_that_the_list_names_wrongly() -> None:
    full_name = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
    methods = {
        f"/{full_name}/{method.name}"
        for method in inference_pb2.DESCRIPTOR.services_by_name["Inference"].methods
    }
    ours = {method for method in OPEN_METHODS if method.startswith(f"/{full_name}/")}
    assert ours <= methods
    assert hasattr(inference_pb2_grpc, "InferenceStub")
