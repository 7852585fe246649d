"""A request that would be late is refused before anything is computed for it."""

from pathlib import Path

import grpc
import httpx
import pytest

from pdserve.errors import Overloaded
from pdserve.predictor.profile import Profile
from tests.support.models import tiny_llama_folder  # noqa: F401
from tests.support.router_harness import Cluster, generate, request_for, run_cluster


@pytest.fixture
def slow_profile(tmp_path: Path) -> str:
    """A worker that takes ten seconds for the prompt of these tests."""
    profile = Profile(
        worker_class="unknown",
        prefill=(0.0, 0.25, 0.0),
        decode=(0.01, 0.0, 0.0),
        transfer=(0.001, 0.0),
        kv_bytes_per_token=1024,
        kv_tokens=100_000,
    )
    path = tmp_path / "slow.json"
    path.write_text(profile.to_json())
    return str(path)


async def _add_workers(cluster: Cluster) -> None:
    for name in ("p0", "d0"):
        await cluster.add(name)
    await cluster.ready(2)


async def test_a_first_token_that_would_be_late_is_refused_with_the_time_it_lacks(
    tiny_llama_folder: Path,  # noqa: F811
    slow_profile: str,
) -> None:
    async with run_cluster(
        tiny_llama_folder, profiles=(slow_profile,), slo_classes=("chat=ttft_s:2",)
    ) as cluster:
        await _add_workers(cluster)
        request = request_for()
        request.slo_class = "chat"
        result = await generate(cluster, request)
        assert isinstance(result.error, Overloaded)
        assert "2 s" in str(result.error)
        assert result.error.retry_after_s == pytest.approx(8.0, rel=0.1)
        assert cluster.network.submits == []
        await cluster.quiet()


async def test_a_class_without_a_limit_and_a_request_without_a_class_are_served(
    tiny_llama_folder: Path,  # noqa: F811
    slow_profile: str,
) -> None:
    async with run_cluster(
        tiny_llama_folder, profiles=(slow_profile,), slo_classes=("batch=priority:5",)
    ) as cluster:
        await _add_workers(cluster)
        request = request_for()
        request.slo_class = "batch"
        assert (await generate(cluster, request)).completion is not None
        assert (await generate(cluster)).completion is not None


async def test_nothing_is_refused_while_nothing_is_predicted(
    tiny_llama_folder: Path,  # noqa: F811
) -> None:
    async with run_cluster(tiny_llama_folder) as cluster:
        await _add_workers(cluster)
        request = request_for()
        request.ttft_slo_s = 1e-6
        assert (await generate(cluster, request)).completion is not None


async def test_an_unknown_class_is_a_mistake_of_the_client(
    tiny_llama_folder: Path,  # noqa: F811
) -> None:
    async with run_cluster(tiny_llama_folder) as cluster:
        await _add_workers(cluster)
        request = request_for()
        request.slo_class = "nobody"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in cluster.stub.Generate(request, timeout=5):
                pass
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_over_http_a_header_names_the_class_and_the_answer_says_when_to_retry(
    tiny_llama_folder: Path,  # noqa: F811
    slow_profile: str,
) -> None:
    async with run_cluster(
        tiny_llama_folder, profiles=(slow_profile,), slo_classes=("chat=ttft_s:2",)
    ) as cluster:
        await _add_workers(cluster)
        base = f"http://127.0.0.1:{cluster.front.http_port}"
        async with httpx.AsyncClient(base_url=base) as client:
            answer = await client.post(
                "/v1/completions",
                json={"model": "tiny", "prompt": list(range(10, 50)), "max_tokens": 4},
                headers={"x-slo-class": "chat"},
            )
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 7


async def test_the_predictor_s_error_is_a_metric(
    tiny_llama_folder: Path,  # noqa: F811
    slow_profile: str,
) -> None:
    async with run_cluster(tiny_llama_folder, profiles=(slow_profile,)) as cluster:
        await _add_workers(cluster)
        await generate(cluster)
        registry = cluster.front.metrics_registry
        labels = {
            "model_name": "tiny",
            "engine": "0",
            "role": "router",
            "worker_class": "unknown",
            "kind": "prefill",
        }
        assert registry.get_sample_value("pdserve_predictor_error", labels) is not None
