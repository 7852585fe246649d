"""Pools of Kubernetes against an API server over real HTTP: sizes, who leaves, and refusals."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from autoscaler.controller import Controller
from autoscaler.figures import Reading, Traffic, WorkerFigures
from autoscaler.settings import PoolRange, ScalingSettings
from launcher.kubernetes_api import KubernetesApi, KubernetesConfig, read_namespace
from launcher.kubernetes_pools import KubernetesPools, PoolObject, parse_pool_object
from launcher.pool_figures import ClusterFigures
from pdserve.errors import ConfigError, PoolApiError
from pdserve.predictor.predictor import Predictor
from pdserve.registry.memory import MemoryRegistry
from pdserve.request import Role
from pdserve.timeline import ManualClock
from tests.support.fake_kubernetes import COST, FakeKubernetes, serving
from tests.support.records import make_record

ROUTERS = "app.kubernetes.io/part-of=pdserve,app.kubernetes.io/component=router"


class Bench:
    """Two pools, what serves them, and a token."""

    def __init__(self, stack: ExitStack, folder: Path, kind: str, timeout_s: float = 10.0) -> None:
        self.kube = FakeKubernetes(kind=kind)
        self.kube.add_pool("prefill", 1)
        self.kube.add_pool("decode", 3)
        url = stack.enter_context(serving(self.kube))
        self.token_file = folder / "token"
        self.token_file.write_text(self.kube.token + "\n")
        self.registry = MemoryRegistry(ManualClock())
        config = KubernetesConfig(
            url=url, token_file=self.token_file, namespace="ns", timeout_s=timeout_s
        )
        self.pools = stack.enter_context(
            KubernetesPools(
                KubernetesApi(config),
                {
                    role: PoolObject(kind=kind, name=f"pdserve-{role}")  # type: ignore[arg-type]
                    for role in Role
                },
                self.registry,
                router_selector=ROUTERS,
                router_port=50051,
            )
        )

    def sizes(self) -> tuple[int, int]:
        return self.kube.replicas["pdserve-prefill"], self.kube.replicas["pdserve-decode"]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with ExitStack() as stack:
        yield Bench(stack, tmp_path, "statefulsets")


@pytest.fixture
def deployed(tmp_path: Path) -> Iterator[Bench]:
    with ExitStack() as stack:
        yield Bench(stack, tmp_path, "deployments")


def test_pool_grows_through_the_scale_of_its_object(bench: Bench) -> None:
    bench.pools.scale(Role.PREFILL, 3)
    assert bench.sizes() == (3, 3)
    assert len(bench.kube.alive("pdserve-prefill")) == 3
    method, path, body = bench.kube.calls[-1]
    assert (method, path) == (
        "PUT",
        "/apis/apps/v1/namespaces/ns/statefulsets/pdserve-prefill/scale",
    )
    assert body is not None
    assert body["spec"] == {"replicas": 3}


def test_pool_that_has_as_many_already_is_not_touched_nor_made_smaller(bench: Bench) -> None:
    bench.pools.scale(Role.DECODE, 3)
    bench.pools.scale(Role.DECODE, 2)
    assert bench.sizes() == (1, 3)
    assert {method for method, _, _ in bench.kube.calls} == {"GET"}


def test_pool_of_none_grows_although_zeros_are_left_out(bench: Bench) -> None:
    bench.kube.resize("pdserve-prefill", 0)
    bench.pools.scale(Role.PREFILL, 1)
    assert bench.sizes() == (1, 3)


def test_C15_stateful_set_loses_its_highest_number_and_no_other(bench: Bench) -> None:
    with pytest.raises(PoolApiError, match="would take pdserve-decode-2 of the decode pool, not"):
        bench.pools.drain("pdserve-decode-0")
    assert bench.sizes() == (1, 3)
    bench.pools.drain("pdserve-decode-2")
    assert bench.sizes() == (1, 2)
    assert bench.kube.alive("pdserve-decode") == ["pdserve-decode-0", "pdserve-decode-1"]


def test_C15_deployment_loses_the_pod_that_was_chosen(deployed: Bench) -> None:
    first = deployed.kube.alive("pdserve-decode")[0]
    deployed.pools.drain(first)
    assert first not in deployed.kube.alive("pdserve-decode")
    assert deployed.kube.pods[first]["metadata"]["annotations"] == {COST: "-1000"}
    assert deployed.sizes() == (1, 2)


def test_pod_that_is_gone_is_a_key_error_and_changes_no_size(deployed: Bench) -> None:
    with pytest.raises(KeyError):
        deployed.pools.drain("pdserve-decode-99")
    assert deployed.sizes() == (1, 3)


def test_pod_that_leaves_already_is_not_taken_for_one_that_could(bench: Bench) -> None:
    bench.pools.drain("pdserve-decode-2")
    with pytest.raises(KeyError):
        bench.pools.drain("pdserve-decode-2")
    assert bench.sizes() == (1, 2)


def test_size_that_somebody_else_changed_meanwhile_is_read_again(bench: Bench) -> None:
    bench.kube.conflicts = 3
    bench.pools.scale(Role.PREFILL, 2)
    assert bench.sizes() == (2, 3)


def test_conflict_without_end_is_given_up(bench: Bench) -> None:
    bench.kube.conflicts = 99
    with pytest.raises(PoolApiError, match="409 the object has been modified") as caught:
        bench.pools.scale(Role.PREFILL, 2)
    assert caught.value.status == 409
    assert bench.sizes() == (1, 3)
    assert sum(method == "PUT" for method, _, _ in bench.kube.calls) == 4


@pytest.mark.parametrize("status", [401, 403, 404, 429, 500, 503])
def test_refusal_says_status_and_reason_and_changes_nothing(bench: Bench, status: int) -> None:
    bench.kube.failures.append(status)
    with pytest.raises(PoolApiError, match=f"{status} ordered {status}") as caught:
        bench.pools.scale(Role.PREFILL, 2)
    assert caught.value.status == status
    assert bench.sizes() == (1, 3)


def test_answer_that_is_no_json_is_a_refusal_too(bench: Bench) -> None:
    bench.kube.failures.append("html")
    with pytest.raises(PoolApiError, match=r"502 .*bad gateway"):
        bench.pools.members()


def test_server_that_says_nothing_is_given_up_in_time(tmp_path: Path) -> None:
    with ExitStack() as stack:
        bench = Bench(stack, tmp_path, "statefulsets", timeout_s=0.3)
        bench.kube.failures.append("silence")
        with pytest.raises(PoolApiError, match="does not answer") as caught:
            bench.pools.members()
        assert caught.value.status is None


def test_renewed_token_is_read_for_the_next_call(bench: Bench) -> None:
    bench.kube.token = "token-2"
    with pytest.raises(PoolApiError, match="401 Unauthorized"):
        bench.pools.members()
    bench.token_file.write_text("token-2")
    assert len(bench.pools.members()) == 4


async def register(bench: Bench, *names: str) -> None:
    for name in names:
        role = Role.PREFILL if "prefill" in name else Role.DECODE
        await bench.registry.register(make_record(name, role, worker_class="gpu"), 60.0)


def test_members_are_pods_with_what_they_registered(bench: Bench) -> None:
    bench.pools._runner.run(register(bench, "pdserve-decode-0"))
    bench.kube.pods["pdserve-decode-1"]["status"]["phase"] = "Failed"
    bench.kube.pods["pdserve-decode-2"]["metadata"]["deletionTimestamp"] = "2030-01-01T00:00:00Z"
    found = {member.worker_id: member for member in bench.pools.members()}
    assert set(found) == {"pdserve-prefill-0", "pdserve-decode-0", "pdserve-decode-2"}
    assert found["pdserve-decode-0"].record is not None
    assert found["pdserve-prefill-0"].record is None
    assert found["pdserve-decode-2"].is_draining
    assert not found["pdserve-decode-0"].is_draining


def test_C18_pods_stay_known_while_the_registry_is_away(bench: Bench) -> None:
    bench.pools._runner.run(register(bench, "pdserve-decode-0"))
    bench.pools.members()
    bench.registry.is_available = False
    serving_ones = [member for member in bench.pools.members() if member.record is not None]
    assert [member.worker_id for member in serving_ones] == ["pdserve-decode-0"]


def test_routers_are_asked_at_their_pods_own_addresses(bench: Bench) -> None:
    bench.kube.add_pod("pdserve-router-a", "router", ip="10.0.0.4")
    bench.kube.add_pod("pdserve-router-b", "router", ip="fd00::5")
    bench.kube.add_pod("pdserve-router-c", "router")
    assert bench.pools.router_addresses() == ("10.0.0.4:50051", "[fd00::5]:50051")


def test_nothing_is_decided_while_the_api_server_does_not_answer(bench: Bench) -> None:
    with ClusterFigures(bench.pools, None) as figures:
        bench.kube.failures.append(500)
        assert figures.read().traffic is None


class ShownFigures:
    """Pods as the API server has them, and a backlog."""

    def __init__(self, pools: KubernetesPools) -> None:
        self.pools = pools
        self.num_read = 0

    def read(self) -> Reading:
        self.num_read += 1
        workers = tuple(
            WorkerFigures(
                worker_id=member.worker_id,
                role=member.role,
                is_serving=not member.is_draining,
                is_draining=member.is_draining,
                queued_tokens=50_000 if member.role is Role.PREFILL else 0,
                total_blocks=100,
            )
            for member in self.pools.members()
        )
        traffic = Traffic(num_arrived=0, prompt_tokens=0, output_tokens=0, num_in_flight=5)
        return Reading(workers=workers, traffic=traffic)


def make_controller(bench: Bench, lines: list[str]) -> tuple[Controller, ManualClock]:
    bounds, clock = PoolRange(least=1, most=4), ManualClock()
    settings = ScalingSettings(
        prefill=bounds, decode=bounds, leave_by_number=True, settle_s=20.0, idle_s=1e6
    )
    figures = ShownFigures(bench.pools)
    controller = Controller(
        settings, figures, bench.pools, clock, predictor=Predictor(), report=lines.append
    )
    return controller, clock


def test_autoscaler_grows_and_shrinks_pools_of_kubernetes(bench: Bench) -> None:
    lines: list[str] = []
    controller, clock = make_controller(bench, lines)
    for _ in range(80):
        clock.advance(1.0)
        controller.tick()
    assert bench.sizes() == (4, 1)
    assert bench.kube.alive("pdserve-decode") == ["pdserve-decode-0"]
    assert not [line for line in lines if "not done" in line]


def test_order_that_kubernetes_refuses_is_told_and_tried_again(bench: Bench) -> None:
    lines: list[str] = []
    controller, clock = make_controller(bench, lines)
    clock.advance(1.0)
    # Two lists of pods and two scales are read before the order.
    bench.kube.failures.extend(["pass"] * 4)
    bench.kube.failures.append(403)
    controller.tick()
    assert bench.sizes() == (1, 3)
    assert "prefill: not done: " in lines[-1]
    assert "403 ordered 403" in lines[-1]
    for _ in range(6):
        clock.advance(1.0)
        controller.tick()
    assert bench.sizes() == (2, 3)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl here")
def test_server_is_known_by_the_ca_alone(tmp_path: Path) -> None:
    for name in ("mine", "other"):
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
             "-nodes", "-keyout", f"{name}.key", "-out", f"{name}.crt", "-subj", "/CN=kube",
             "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"],
            cwd=tmp_path, check=True, capture_output=True,
        )  # fmt: skip
    both = tmp_path / "both.pem"
    both.write_text((tmp_path / "mine.key").read_text() + (tmp_path / "mine.crt").read_text())
    kube = FakeKubernetes()
    kube.add_pool("decode", 1)
    (tmp_path / "token").write_text(kube.token)
    with serving(kube, certificate=both) as url:
        for ca, is_trusted in (("mine", True), ("other", False)):
            api = KubernetesApi(
                KubernetesConfig(
                    url=url,
                    token_file=tmp_path / "token",
                    ca_file=tmp_path / f"{ca}.crt",
                    namespace="ns",
                )
            )
            path = ("apis/apps/v1", "statefulsets", "pdserve-decode", "scale")
            if is_trusted:
                assert api.get(*path)["spec"] == {"replicas": 1}
            else:
                with pytest.raises(PoolApiError, match="CERTIFICATE_VERIFY_FAILED"):
                    api.get(*path)
    # Nobody who was not known was shown the token.
    assert len(kube.calls) == 1


def test_what_a_pod_lacks_is_said_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--namespace must be given outside of a pod"):
        read_namespace(tmp_path)
    (tmp_path / "namespace").write_text("mine\n")
    assert read_namespace(tmp_path) == "mine"
    with pytest.raises(ConfigError, match=r"ca\.crt is no CA"):
        KubernetesApi(
            KubernetesConfig(url="https://k:1", ca_file=tmp_path / "ca.crt", namespace="ns")
        )
    with pytest.raises(ConfigError, match="must be https"):
        KubernetesConfig(url="kube", namespace="ns")
    api = KubernetesApi(
        KubernetesConfig(url="http://127.0.0.1:1", token_file=tmp_path / "none", namespace="ns")
    )
    with pytest.raises(PoolApiError, match="no token to show"):
        api.get("api/v1", "pods")


@pytest.mark.parametrize("text", ["pod/x", "statefulset/", "pdserve-decode"])
def test_pool_is_a_stateful_set_or_a_deployment(text: str) -> None:
    assert parse_pool_object("deployment/d") == PoolObject(kind="deployments", name="d")
    with pytest.raises(ConfigError, match="statefulset/NAME or deployment/NAME"):
        parse_pool_object(text)
