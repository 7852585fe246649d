"""A cluster as others use it, wherever its replicas run; and how a pool changes its size."""

import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from pdserve.errors import ConfigError
from pdserve.registry.base import WorkerRecord
from pdserve.request import Role


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """A replica as the launcher sees it."""

    worker_id: str
    role: Role
    face_pid: int | None
    """None between an end and the restart."""
    num_restarts: int
    is_draining: bool
    """It leaves for good."""
    record: WorkerRecord | None
    """What it registered; None while it is starting, frozen or gone."""


class Cluster(Protocol):
    """What commands, tests and autoscalers do with a cluster. Any thread may call."""

    def start(self) -> None:
        """Starts everything and returns once the router serves with both pools complete.

        Raises:
            ConfigError: something the user can mend; nothing is left running.
            InternalError: a child ended or did not get ready; nothing is left running.
        """

    def members(self) -> tuple[Member, ...]:
        """Returns all replicas with their pids and records."""

    def scale(self, role: Role, num_replicas: int) -> None:
        """Begins to start replicas, or to drain those with the highest numbers.

        Raises:
            ConfigError: the pool would be empty, or the cluster has no such pool.
        """

    def drain(self, worker_id: str) -> None:
        """Begins to drain one replica for good; its pool is one smaller.

        Raises:
            KeyError: there is no such replica.
            ConfigError: it is the last of its pool.
        """

    def flip(self, worker_id: str, role: Role) -> None:
        """Begins to drain one replica and lets it go on in the other pool, its weights loaded.

        Raises:
            KeyError: there is no such replica.
            ConfigError: it is the last of its pool, does not serve now or has that role, or
                replicas of this cluster cannot flip.
        """

    def kill(
        self,
        worker_id: str,
        which: Literal["face", "rank"] = "face",
        signal_number: int = signal.SIGKILL,
    ) -> None:
        """Sends a signal to one process of a replica on this machine; if it ends, it is restarted.

        Raises:
            ProcessLookupError: that process does not run now.
        """

    def stop(self, *, now: bool = False) -> None:
        """Drains (or with `now` kills) everything and waits for the end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """An order to change the size of a pool."""

    role: Role
    num_replicas: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Drain:
    """An order to drain one replica for good."""

    worker_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Flip:
    """An order to let one replica go on in another pool, with its weights loaded."""

    worker_id: str
    role: Role
    """That it is to have."""


Order = Scale | Drain | Flip


@dataclass(frozen=True, kw_only=True, slots=True)
class SizePlan:
    """What makes a pool the size it should be."""

    added: tuple[str, ...] = ()
    retired: tuple[str, ...] = ()


def plan_size(members: Sequence[Member], order: Scale | Drain) -> SizePlan:
    """Says which replicas to start or to drain.

    Those that have not served yet leave first, then the highest numbers. New ones take the lowest
    numbers that nobody has, not even one that still drains: two processes of one name would fight
    for its place in the registry.
    """
    if isinstance(order, Drain):
        names = [m.worker_id for m in members if not m.is_draining]
        return SizePlan(retired=(order.worker_id,) if order.worker_id in names else ())
    pool = [m for m in members if m.role is order.role]
    active = [m for m in pool if not m.is_draining]
    if order.num_replicas <= len(active):
        active.sort(key=lambda m: (m.record is None, _number(m.worker_id)))
        retired = sorted((m.worker_id for m in active[order.num_replicas :]), key=_number)
        return SizePlan(retired=tuple(retired))
    # Of both pools: one that has flipped keeps its name.
    taken = {m.worker_id for m in members}
    limit = len(taken) + order.num_replicas
    free = [name for i in range(limit) if (name := f"{order.role}-{i}") not in taken]
    return SizePlan(added=tuple(free[: order.num_replicas - len(active)]))


def check_order(
    members: Sequence[Member],
    order: Order,
    *,
    pools: Collection[Role],
    can_be_empty: bool = False,
) -> None:
    """Refuses an order that would leave a pool empty, or that nobody could carry out.

    Args:
        members: all replicas.
        order: to check.
        pools: that the cluster was started with.
        can_be_empty: whether pools may lose their last replica, other than to each other.

    Raises:
        KeyError: there is no such replica.
        ConfigError: the pool would be empty, the cluster has no such pool, or the replica that is
            to flip does not serve now or has that role.
    """
    if isinstance(order, Scale):
        if order.num_replicas < (0 if can_be_empty else 1):
            raise ConfigError(f"a {order.role} pool needs a replica, got {order.num_replicas}")
        if order.role not in pools:
            raise ConfigError(f"the cluster was started without a {order.role} pool")
        return
    if isinstance(order, Flip) and order.role not in pools:
        raise ConfigError(f"the cluster was started without a {order.role} pool")
    member = next((m for m in members if m.worker_id == order.worker_id), None)
    if member is None:
        raise KeyError(order.worker_id)
    if isinstance(order, Flip):
        _check_flips(member, order.role)
    role = member.role
    others = [m for m in members if m.role is role and m.worker_id != order.worker_id]
    # The last one is not given away to the other pool: it would have to come back for each request.
    may_be_last = can_be_empty and isinstance(order, Drain)
    if not may_be_last and not any(not m.is_draining for m in others):
        raise ConfigError(f"{order.worker_id} is the last of the {role} pool")


def _check_flips(member: Member, role: Role) -> None:
    name = member.worker_id
    if member.is_draining:
        raise ConfigError(f"{name} drains for good")
    if member.record is None:
        # It starts or is restarted; or it is on its way to the other pool already.
        raise ConfigError(f"{name} does not serve as a {member.role} replica yet")
    if member.role is role:
        raise ConfigError(f"{name} is a {role} replica already")


def _number(worker_id: str) -> int:
    return int(worker_id.rpartition("-")[2])
