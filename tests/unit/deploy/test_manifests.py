"""What Kubernetes and KubeRay would refuse or misread, seen without either."""

import copy
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import typer
import yaml

from autoscaler.settings import parse_range
from launcher.cli import make_app
from pdserve.config.load import from_argv
from pdserve.config.router import RouterConfig
from pdserve.config.worker import WorkerConfig
from pdserve.request import Role
from tests.support.manifests import (
    DEPLOY,
    Pod,
    errors_of,
    manifest_paths,
    manifests,
    parse_documents,
    pods,
)

PART_OF = "app.kubernetes.io/part-of"
_LEAVE_RAY_S, _CLOSE_S = 15, 20
"""What drain_pod may spend on Ray, and a face after its drain (`CLOSE_TIMEOUT_S`)."""

every_pod = pytest.mark.parametrize("pod", pods(), ids=lambda pod: pod.owner)


def named(kind: str, name: str) -> dict[str, Any]:
    (found,) = [m for m in manifests() if (m["kind"], m["metadata"]["name"]) == (kind, name)]
    return found


def pods_of(*components: str) -> list[Pod]:
    return [pod for pod in pods() if pod.component in components]


@pytest.mark.parametrize("path", manifest_paths(), ids=lambda path: path.name)
def test_every_manifest_has_only_fields_that_its_kind_has(path: Any) -> None:
    documents = parse_documents(path.read_text("utf-8"))
    assert documents
    for document in documents:
        assert errors_of(document) == []


def spoil(*path: str | int) -> Callable[[dict[str, Any]], None]:
    def change(manifest: Any) -> None:
        for step in path[:-1]:
            manifest = manifest[step]
        manifest[path[-1]] = "unheard of"

    return change


@pytest.mark.parametrize(
    ("kind", "name", "path"),
    [
        ("RayCluster", "pdserve", ("spec", "workerGroupSpecs", 1, "replicaz")),
        ("RayCluster", "pdserve", ("spec", "workerGroupSpecs", 1, "template", "spec", "image")),
        ("RayCluster", "pdserve", ("spec", "authOptions", "mode")),
        ("RayCluster", "pdserve", ("spec", "gcsFaultToleranceOptions", "redisAdress")),
        ("Deployment", "pdserve-router", ("spec", "template", "spec", "containers", 0, "probe")),
        ("StatefulSet", "pdserve-decode", ("spec", "replicas")),
        ("NetworkPolicy", "pdserve-inside", ("spec", "ingres")),
        ("PodDisruptionBudget", "pdserve-router", ("metadata", "label")),
    ],
)
def test_a_field_that_does_not_exist_or_has_another_type_is_refused(
    kind: str, name: str, path: tuple[str | int, ...]
) -> None:
    spoilt = copy.deepcopy(named(kind, name))
    spoil(*path)(spoilt)
    # Two groups of the RayCluster share one template.
    assert len(errors_of(spoilt)) in (1, 2)


def test_a_key_that_stands_twice_is_refused() -> None:
    with pytest.raises(yaml.YAMLError, match="twice"):
        parse_documents("spec: {replicas: 1, replicas: 2}")


@pytest.mark.parametrize("folder", ["shared", "kubernetes", "kuberay"])
def test_kustomize_lists_every_manifest_of_its_folder(folder: str) -> None:
    (listed,) = parse_documents((DEPLOY / folder / "kustomization.yaml").read_text("utf-8"))
    assert set(listed) <= {"apiVersion", "kind", "namespace", "resources", "images"}
    names = {name for name in listed["resources"] if name.endswith(".yaml")}
    there = {path.name for path in manifest_paths() if path.parent.name == folder}
    assert names == there
    for name in listed["resources"]:
        assert (DEPLOY / folder / name).exists()


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl here")
@pytest.mark.parametrize("folder", ["kubernetes", "kuberay"])
def test_kustomize_builds_what_would_be_applied(folder: str) -> None:
    built = subprocess.run(
        ["kubectl", "kustomize", str(DEPLOY / folder)], capture_output=True, text=True, check=True
    )
    kinds = [document["kind"] for document in parse_documents(built.stdout)]
    assert kinds.count("NetworkPolicy") == 3
    assert "StatefulSet" in kinds


@every_pod
def test_no_service_writes_a_variable_that_pdserve_would_read(pod: Pod) -> None:
    # A Service called pdserve puts PDSERVE_PORT=tcp://... into every pod of its namespace.
    assert pod.spec["enableServiceLinks"] is False


@every_pod
def test_every_pod_runs_as_nobody_in_particular(pod: Pod) -> None:
    assert pod.spec["securityContext"]["runAsNonRoot"] is True
    assert pod.spec["securityContext"]["runAsUser"] > 0
    assert pod.container["securityContext"]["allowPrivilegeEscalation"] is False
    assert pod.container["securityContext"]["capabilities"]["drop"] == ["ALL"]


@every_pod
def test_every_pod_says_what_it_takes_and_memory_is_never_overcommitted_on_gpus(pod: Pod) -> None:
    resources = pod.container["resources"]
    assert {"cpu", "memory"} <= set(resources["requests"])
    if pod.component in ("prefill", "decode"):
        assert resources["requests"] == resources["limits"]
        assert int(resources["limits"]["nvidia.com/gpu"]) >= 1


@every_pod
def test_every_mount_has_its_volume(pod: Pod) -> None:
    mounts = {mount["name"] for mount in pod.container.get("volumeMounts", [])}
    volumes = {volume["name"] for volume in pod.spec.get("volumes", [])}
    claims = {"data"} if pod.component == "redis" else set()
    assert mounts == volumes | claims


def seconds_of_pre_stop(pod: Pod) -> float:
    command = pod.container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
    if command is None:
        return 0.0
    if command[0] == "drain_pod":
        return float(command[command.index("--timeout-s") + 1]) + _LEAVE_RAY_S
    assert command[0] == "sleep"
    return float(command[1])


@pytest.mark.parametrize("pod", pods_of("router", "prefill", "decode"), ids=lambda pod: pod.owner)
def test_a_pod_has_time_to_drain_before_it_is_killed(pod: Pod) -> None:
    drain_s = float(pod.flag("--drain-timeout-s") or 0.0)
    needed_s = seconds_of_pre_stop(pod) + drain_s + _CLOSE_S
    assert needed_s >= 60.0
    assert pod.spec["terminationGracePeriodSeconds"] >= needed_s


def test_a_pod_of_a_pool_under_ray_waits_longer_than_its_replicas_may_drain() -> None:
    (front,) = [p for p in pods_of("router") if p.owner.startswith("RayCluster")]
    drain_s = float(front.flag("--drain-timeout-s") or "nan")
    pools = [p for p in pods_of("prefill", "decode") if p.owner.startswith("RayCluster")]
    assert len(pools) == 2
    for pod in pools:
        assert seconds_of_pre_stop(pod) - _LEAVE_RAY_S > drain_s


@pytest.mark.parametrize("pod", pods_of("router"), ids=lambda pod: pod.owner)
def test_a_router_is_ready_by_its_own_health_and_not_restarted_for_that_of_its_pools(
    pod: Pod,
) -> None:
    assert pod.container["readinessProbe"]["grpc"]["port"] == int(pod.flag("--port") or 0)
    assert "grpc" not in pod.container["livenessProbe"]
    assert seconds_of_pre_stop(pod) > 0


def test_the_probes_of_workers_ask_the_port_of_their_face() -> None:
    workers = [p for p in pods_of("prefill", "decode") if p.owner.startswith("StatefulSet")]
    assert len(workers) == 2
    for pod in workers:
        for name in ("startupProbe", "readinessProbe"):
            assert pod.container[name]["grpc"]["port"] == int(pod.flag("--port") or 0)


@pytest.mark.parametrize("folder", ["kubernetes", "kuberay"])
def test_every_port_of_a_service_is_a_named_one_of_the_pods_behind_it(folder: str) -> None:
    there = [pod for pod in pods() if pod.folder in (folder, "shared")]
    services = [m for m in manifests(folder, "shared") if m["kind"] == "Service"]
    assert len(services) >= 2
    for service in services:
        chosen = service["spec"]["selector"].items()
        behind = [pod for pod in there if chosen <= pod.labels.items()]
        assert behind, service["metadata"]["name"]
        for pod in behind:
            ports = {port["name"] for port in pod.container["ports"]}
            assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports


@pytest.mark.parametrize("kind", ["PodDisruptionBudget", "NetworkPolicy"])
def test_every_selector_finds_pods(kind: str) -> None:
    found = [m for m in manifests() if m["kind"] == kind]
    assert len(found) == 3
    for manifest in found:
        spec = manifest["spec"]
        wanted = spec.get("selector", spec.get("podSelector"))["matchLabels"].items()
        assert any(wanted <= pod.labels.items() for pod in pods())


def test_E2_every_pod_is_behind_the_policy_that_lets_only_pdserve_in() -> None:
    spec = named("NetworkPolicy", "pdserve-inside")["spec"]
    inside = {"matchLabels": {PART_OF: "pdserve"}}
    assert spec["podSelector"] == inside
    assert spec["ingress"] == [{"from": [{"podSelector": inside}]}]
    assert all(pod.labels[PART_OF] == "pdserve" for pod in pods())


def test_E2_other_namespaces_reach_named_ports_alone() -> None:
    for name in ("pdserve-clients", "pdserve-scrapes"):
        for rule in named("NetworkPolicy", name)["spec"]["ingress"]:
            assert rule["ports"], "a rule without ports opens all of them"
            assert all("namespaceSelector" in peer for peer in rule["from"])


def test_E3_rays_dashboard_is_on_loopback_and_ray_asks_for_a_token() -> None:
    spec = named("RayCluster", "pdserve")["spec"]
    head = spec["headGroupSpec"]
    assert head["rayStartParams"]["dashboard-host"] == "127.0.0.1"
    assert head["enableIngress"] is False
    assert head["serviceType"] == "ClusterIP"
    assert spec["authOptions"]["mode"] == "token"


def test_no_service_is_open_to_the_outside_unless_somebody_makes_it_so() -> None:
    for manifest in manifests():
        if manifest["kind"] == "Service":
            assert manifest["spec"].get("type", "ClusterIP") == "ClusterIP"


def test_C17_rays_head_keeps_what_it_knows_in_redis_and_runs_no_replica() -> None:
    spec = named("RayCluster", "pdserve")["spec"]
    redis = named("Service", "pdserve-redis")
    host, port = redis["metadata"]["name"], redis["spec"]["ports"][0]["port"]
    assert spec["gcsFaultToleranceOptions"]["redisAddress"] == f"redis://{host}:{port}"
    assert spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


def test_each_pool_of_ray_offers_what_its_replicas_ask_for() -> None:
    groups = {g["groupName"]: g for g in named("RayCluster", "pdserve")["spec"]["workerGroupSpecs"]}
    assert groups["prefill"]["resources"] == {"pdserve_prefill": "1"}
    assert groups["decode"]["resources"] == {"pdserve_decode": "1"}
    for name in ("prefill", "decode"):
        assert groups[name]["minReplicas"] >= 1
        assert groups[name]["minReplicas"] <= groups[name]["replicas"]
        assert groups[name]["replicas"] <= groups[name]["maxReplicas"]


def test_no_password_or_key_stands_in_a_manifest() -> None:
    for pod in pods():
        for variable in pod.container.get("env", []):
            if any(word in variable["name"] for word in ("PASSWORD", "TOKEN", "SECRET", "KEY")):
                assert "secretKeyRef" in variable["valueFrom"]
        assert not any("key=" in text.lower() for text in pod.container.get("args", []))


@pytest.mark.parametrize(
    "pod",
    [p for p in pods_of("router", "prefill", "decode") if not p.owner.startswith("Ray")],
    ids=lambda pod: pod.owner,
)
def test_the_flags_of_a_role_are_flags_that_it_has(pod: Pod) -> None:
    role, *flags = pod.container["args"]
    kind = RouterConfig if role == "router" else WorkerConfig
    fixed = {} if role == "router" else {"role": Role(role.removesuffix("-worker"))}
    from_argv(kind, flags, {"PDSERVE_REDIS": "redis://r:1"}, program=role, fixed=fixed)


@pytest.mark.parametrize(
    "pod", [p for p in pods_of("router") if p.owner.startswith("Ray")], ids=lambda pod: pod.owner
)
def test_the_flags_of_the_launcher_are_flags_that_it_has(pod: Pod) -> None:
    assert "--ray-pools" in pod.flags
    command = typer.main.get_command(make_app()).commands["serve"]  # type: ignore[attr-defined]
    command.make_context("serve", ["/models/model", *pod.flags])


def test_only_the_autoscaler_has_a_token_of_the_api_server() -> None:
    ours = [pod for pod in pods() if not pod.owner.startswith("RayCluster")]
    with_token = [pod.component for pod in ours if pod.spec["automountServiceAccountToken"]]
    assert with_token == ["autoscaler"]


def test_the_autoscaler_may_change_the_scale_of_its_pools_and_see_pods_and_nothing_else() -> None:
    (pod,) = pods_of("autoscaler")
    pools = [str(pod.flag(f"--{name}-pool")).split("/") for name in ("prefill", "decode")]
    assert (
        pod.spec["serviceAccountName"]
        == named("ServiceAccount", "pdserve-autoscaler")["metadata"]["name"]
    )
    (rules,) = [named("Role", "pdserve-autoscaler")["rules"]]
    assert rules == [
        {
            "apiGroups": ["apps"],
            "resources": ["statefulsets/scale"],
            "resourceNames": [name for _, name in pools],
            "verbs": ["get", "update"],
        },
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]},
    ]
    for kind, name in pools:
        assert kind == "statefulset"
        named("StatefulSet", name)
    binding = named("RoleBinding", "pdserve-autoscaler")
    assert binding["roleRef"]["name"] == "pdserve-autoscaler"
    assert [one["name"] for one in binding["subjects"]] == ["pdserve-autoscaler"]


def test_two_autoscalers_are_never_at_work_at_once() -> None:
    spec = named("Deployment", "pdserve-autoscaler")["spec"]
    assert spec["replicas"] == 1
    assert spec["strategy"] == {"type": "Recreate"}


def test_the_flags_of_the_autoscaler_are_flags_that_it_has() -> None:
    (pod,) = pods_of("autoscaler")
    command = typer.main.get_command(make_app()).commands["autoscale"]  # type: ignore[attr-defined]
    context = command.make_context("autoscale", [*pod.flags, "--redis=redis://r:1"])
    assert context.params["cluster"] == "pdserve"
    assert parse_range(context.params["decode"]).most > 1
