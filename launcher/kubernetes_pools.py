"""Pools that Kubernetes runs: a StatefulSet or a Deployment each, sized by its `scale`.

Who leaves is Kubernetes' choice, so it is told or foreseen. A StatefulSet removes its highest
number, nobody else: the policy is told to choose so as well (`leave_by_number`), and an order that
would hit another pod is refused. A Deployment removes pods that are not ready first, and then
those with the least `pod-deletion-cost`, which the chosen one gets. Either way the pod gets
SIGTERM, and drains.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

from launcher.kubernetes_api import Json, KubernetesApi
from launcher.pool import Member
from pdserve.errors import ConfigError, PoolApiError
from pdserve.registry.base import Registry, RegistryUnavailable, WorkerRecord
from pdserve.request import Role

DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
LEAVES_FIRST = "-1000"
"""Pods without the annotation cost 0."""
_APPS, _CORE = "apis/apps/v1", "api/v1"
_NUM_TRIES = 4
_CONFLICT, _NOT_FOUND = 409, 404
_ENDED = ("Succeeded", "Failed")


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolObject:
    """What holds the pods of a pool."""

    kind: Literal["statefulsets", "deployments"]
    name: str


def parse_pool_object(text: str) -> PoolObject:
    """Reads `statefulset/NAME` or `deployment/NAME`.

    Raises:
        ConfigError: it is neither.
    """
    kind, slash, name = text.partition("/")
    if slash and name and kind == "statefulset":
        return PoolObject(kind="statefulsets", name=name)
    if slash and name and kind == "deployment":
        return PoolObject(kind="deployments", name=name)
    raise ConfigError(f"a pool must be statefulset/NAME or deployment/NAME, got {text[:64]!r}")


class KubernetesPools:
    """The pools of one cluster. All methods belong to the autoscaler's thread."""

    def __init__(
        self,
        api: KubernetesApi,
        objects: dict[Role, PoolObject],
        registry: Registry,
        *,
        router_selector: str,
        router_port: int,
    ) -> None:
        """Calls nobody yet.

        Args:
            api: of the namespace that all of it is in.
            objects: what holds each pool's pods.
            registry: what workers say of themselves; a worker's id is its pod's name.
            router_selector: labels of the routers' pods.
            router_port: of their gRPC.
        """
        self._api = api
        self._objects = objects
        self._registry = registry
        self._router_selector = router_selector
        self._router_port = router_port
        self._runner = asyncio.Runner()
        self._records: dict[str, WorkerRecord] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._runner.close()

    def members(self) -> tuple[Member, ...]:
        """Returns all pods of both pools with what they registered.

        Raises:
            PoolApiError: the API server refused, or did not answer.
        """
        try:
            found = self._runner.run(self._registry.list_workers())
        except RegistryUnavailable:
            # Those that were known stay known, as for the routers.
            pass
        else:
            self._records = {str(record.worker_id): record for record in found}
        return tuple(
            _to_member(pod, role, self._records)
            for role, held in self._objects.items()
            for pod in self._pods(self._read_scale(held)["status"].get("selector", ""))
            if pod["status"].get("phase") not in _ENDED
        )

    def router_addresses(self) -> tuple[str, ...]:
        """Returns host:port of each router that runs.

        Raises:
            PoolApiError: as `members`.
        """
        addresses = (pod["status"].get("podIP") for pod in self._pods(self._router_selector))
        return tuple(
            f"[{ip}]:{self._router_port}" if ":" in ip else f"{ip}:{self._router_port}"
            for ip in addresses
            if ip
        )

    def scale(self, role: Role, num_replicas: int) -> None:
        """Asks for so many pods, unless there are to be as many already.

        Raises:
            PoolApiError: as `members`.
        """
        self._set_replicas(self._objects[role], at_least=num_replicas)

    def drain(self, worker_id: str) -> None:
        """Lets one pod go, and no other: SIGTERM drains it.

        Raises:
            KeyError: there is no such pod.
            PoolApiError: as `members`; or Kubernetes would take another pod.
        """
        for role, held in self._objects.items():
            scale = self._read_scale(held)
            names = [
                pod["metadata"]["name"]
                for pod in self._pods(scale["status"].get("selector", ""))
                if "deletionTimestamp" not in pod["metadata"]
            ]
            if worker_id not in names:
                continue
            if held.kind == "statefulsets":
                _check_is_last(worker_id, names, role)
            else:
                self._mark(worker_id)
            self._set_replicas(held, fewer=1)
            return
        raise KeyError(worker_id)

    def flip(self, worker_id: str, role: Role) -> None:
        """Is never asked for: a pod belongs to one object for good.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(f"{worker_id} is a pod: it cannot join the {role} pool")

    def _mark(self, name: str) -> None:
        annotations = {DELETION_COST: LEAVES_FIRST}
        try:
            self._api.patch(_CORE, "pods", name, body={"metadata": {"annotations": annotations}})
        except PoolApiError as error:
            if error.status == _NOT_FOUND:
                raise KeyError(name) from error
            raise

    def _set_replicas(
        self, held: PoolObject, *, at_least: int | None = None, fewer: int = 0
    ) -> None:
        """Changes a size; when somebody else did so meanwhile, looks again."""
        for attempt in range(_NUM_TRIES):
            scale = self._read_scale(held)
            now = int(scale["spec"].get("replicas", 0))
            wanted = max(now, at_least or 0) - fewer
            if wanted == now or wanted < 0:
                return
            scale["spec"]["replicas"] = wanted
            try:
                self._api.put(_APPS, held.kind, held.name, "scale", body=scale)
            except PoolApiError as error:
                if error.status != _CONFLICT or attempt == _NUM_TRIES - 1:
                    raise
            else:
                return

    def _read_scale(self, held: PoolObject) -> Json:
        scale = self._api.get(_APPS, held.kind, held.name, "scale")
        # Zeros may be left out.
        scale.setdefault("spec", {})
        scale.setdefault("status", {})
        return scale

    def _pods(self, selector: str) -> Sequence[Json]:
        if not selector:
            # An empty one would choose every pod of the namespace.
            raise PoolApiError("a pool's object says no selector", status=None)
        found = self._api.get(_CORE, "pods", query={"labelSelector": selector})
        pods: list[Json] = found.get("items", [])
        return [{"status": {}, **pod} for pod in pods]


def _to_member(pod: Json, role: Role, records: dict[str, WorkerRecord]) -> Member:
    name = pod["metadata"]["name"]
    record = records.get(name)
    if record is not None and record.role is not role:
        record = None
    restarts = sum(
        int(one.get("restartCount", 0)) for one in pod["status"].get("containerStatuses", [])
    )
    return Member(
        worker_id=name,
        role=role,
        face_pid=None,
        num_restarts=restarts,
        is_draining="deletionTimestamp" in pod["metadata"],
        record=record,
    )


def _check_is_last(worker_id: str, names: Sequence[str], role: Role) -> None:
    last = max(names, key=lambda name: int(name.rpartition("-")[2]))
    if worker_id != last:
        raise PoolApiError(
            f"Kubernetes would take {last} of the {role} pool, not {worker_id}", status=None
        )
