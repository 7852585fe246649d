"""A whole cluster that this process watches: Redis, prefill and decode replicas, a router."""

import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal, Self

from launcher.held_port import HeldPort
from launcher.place import LocalPlace, Place
from launcher.pool import Drain, Flip, Member, Order, Scale, check_order
from launcher.redis_server import RedisServer
from launcher.role_commands import Ports, role_command
from launcher.supervisor import POLL_S, Supervisor
from pdserve.config.cluster import ClusterConfig
from pdserve.errors import ConfigError, InternalError, PdserveError
from pdserve.request import Role

_ORDER_TIMEOUT_S = 5.0
"""The supervisor takes orders several times a second."""


class LocalCluster:
    """Starts, watches and stops a cluster; Redis and the router are children of this process."""

    def __init__(
        self,
        config: ClusterConfig,
        *,
        cluster: str | None = None,
        report: Callable[[str], None] | None = None,
        command_of: Callable[[str], Sequence[str]] = role_command,
        place: Place | None = None,
    ) -> None:
        """Starts nothing yet.

        Args:
            config: pools, engine and addresses; port 0 takes a free one.
            cluster: name in the registry; made up if absent, so that clusters never mix.
            report: takes phase lines and the children's lines, from any thread.
            command_of: what starts a role; tests put stand-ins here.
            place: where the replicas run; children of this process by default.
        """
        self.name = cluster or f"local-{secrets.token_hex(4)}"
        """In the registry."""
        self._host = config.host
        self._has_no_http = config.no_http
        self._can_be_empty = config.can_be_empty
        self._can_flip = config.can_flip
        self._flip_obstacle = config.flip_obstacle or "--flips is off"
        self._pools = (Role.PREFILL, Role.DECODE) if config.num_prefill else (Role.DECODE,)
        self._held_ports: list[HeldPort] = []
        self._port = config.port or self._hold_port()
        self._http_port = config.http_port or self._hold_port()
        self._metrics_port = config.metrics_port or self._hold_port()
        self._supervisor = Supervisor(
            config,
            name=self.name,
            ports=Ports(grpc=self._port, http=self._http_port, metrics=self._metrics_port),
            role_command=command_of,
            place=place or LocalPlace(),
            report=report or (lambda _: None),
        )
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def address(self) -> str:
        """host:port of the router's Inference service."""
        return f"{self._host}:{self._port}"

    @property
    def http_address(self) -> str | None:
        """host:port of the router's HTTP front; None when it is off."""
        return None if self._has_no_http else f"{self._host}:{self._http_port}"

    @property
    def metrics_address(self) -> str:
        """host:port of the router's metrics."""
        return f"{self._host}:{self._metrics_port}"

    @property
    def redis_url(self) -> str:
        """The registry's store, private (once started) or given."""
        url = self._supervisor.redis_url
        assert url is not None, "a private Redis exists once started"
        return url

    @property
    def redis(self) -> RedisServer | None:
        """The private redis-server; None if one was given by URL."""
        return self._supervisor.redis

    @property
    def router_pid(self) -> int | None:
        """Process id of the router while it runs."""
        router = self._supervisor.router
        return None if router is None else router.pid

    def router_addresses(self) -> tuple[str, ...]:
        """Returns the address of the only router."""
        return (self.address,)

    def members(self) -> tuple[Member, ...]:
        """Returns all replicas, oldest first, with their pids and records."""
        return self._supervisor.members()

    def member(self, worker_id: str) -> Member:
        """Returns one replica; KeyError for an unknown id."""
        for member in self.members():
            if member.worker_id == worker_id:
                return member
        raise KeyError(worker_id)

    def pids(self) -> tuple[int, ...]:
        """Returns every process of the cluster that is known to run."""
        redis = self._supervisor.redis
        found = [self.router_pid, None if redis is None else redis.pid]
        for member in self.members():
            found.append(member.face_pid)
            found += () if member.record is None else member.record.rank_pids
        return tuple(pid for pid in found if pid is not None)

    def start(self) -> None:
        """Starts everything and returns once the router serves with both pools complete.

        Raises:
            ConfigError: something the user can mend; nothing is left running.
            InternalError: a child ended or did not get ready; nothing is left running.
        """
        self.launch()
        if not self.wait_ready():
            raise InternalError("the cluster was stopped while it started")

    def launch(self) -> None:
        """Begins to start; `wait_ready` tells how it went."""
        assert self._thread is None, "a cluster starts once"
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)
        self._thread.start()

    def wait_ready(self) -> bool:
        """Waits for the end of the start; False if it was stopped meanwhile.

        Raises:
            PdserveError: as `start`.
        """
        thread = self._require_thread()
        while thread.is_alive() and not self._supervisor.is_ready:
            thread.join(POLL_S)
        self._raise_error()
        return self._supervisor.is_ready

    def wait(self) -> None:
        """Waits until the cluster has stopped; raises what made it stop by itself."""
        thread = self._require_thread()
        while thread.is_alive():
            thread.join(POLL_S)
        self._raise_error()

    def request_stop(self, *, now: bool = False) -> None:
        """Begins to drain, or with `now` to kill; safe in a signal handler."""
        supervisor = self._supervisor
        supervisor.stop_level = 2 if now or supervisor.stop_level == 2 else 1

    def stop(self, *, now: bool = False) -> None:
        """Drains (or with `now` kills) everything and waits for the end."""
        self.request_stop(now=now)
        try:
            if self._thread is not None:
                self.wait()
        finally:
            self._let_ports_go()

    def scale(self, role: Role, num_replicas: int) -> None:
        """Begins to start replicas, or to drain those with the highest numbers.

        Raises:
            ConfigError: the pool would be empty, or the cluster has no such pool.
        """
        self._order(Scale(role=role, num_replicas=num_replicas))

    def drain(self, worker_id: str) -> None:
        """Begins to drain one replica for good; its pool is one smaller.

        Raises:
            KeyError: there is no such replica.
            ConfigError: it is the last of its pool.
        """
        self._order(Drain(worker_id=worker_id))

    def flip(self, worker_id: str, role: Role) -> None:
        """Begins to drain one replica and lets it go on in the other pool, its weights loaded.

        Raises:
            KeyError: there is no such replica.
            ConfigError: it is the last of its pool, does not serve now or has that role, or
                replicas of this cluster cannot flip.
        """
        if not self._can_flip:
            raise ConfigError(
                f"replicas of this cluster cannot change their pool: {self._flip_obstacle}"
            )
        self._order(Flip(worker_id=worker_id, role=role))
        # Whoever counts the pools next must not find it where it was.
        deadline_s = time.monotonic() + _ORDER_TIMEOUT_S
        while self.member(worker_id).role is not role:
            if time.monotonic() > deadline_s:
                raise ConfigError(f"{worker_id} does not serve any more: it keeps its role")
            time.sleep(POLL_S)

    def kill(
        self,
        worker_id: str,
        which: Literal["face", "rank"] = "face",
        signal_number: int = signal.SIGKILL,
    ) -> None:
        """Sends a signal to one process of a replica, for tests and drills.

        Raises:
            ProcessLookupError: that process does not run now.
        """
        member = self.member(worker_id)
        pids: tuple[int, ...] = () if member.face_pid is None else (member.face_pid,)
        if which == "rank":
            pids = () if member.record is None else member.record.rank_pids
        if not pids:
            raise ProcessLookupError(f"{worker_id} has no {which} process now")
        for pid in pids:
            os.kill(pid, signal_number)

    def kill_router(self, signal_number: int = signal.SIGKILL) -> None:
        """Sends a signal to the router; it is restarted on the same port if it ends."""
        pid = self.router_pid
        if pid is None:
            raise ProcessLookupError("the router does not run now")
        os.kill(pid, signal_number)

    def _hold_port(self) -> int:
        held = HeldPort(self._host)
        self._held_ports.append(held)
        return held.number

    def _run(self) -> None:
        self._supervisor.run()
        self._let_ports_go()

    def _let_ports_go(self) -> None:
        for held in self._held_ports:
            held.close()

    def _order(self, order: Order) -> None:
        check_order(self.members(), order, pools=self._pools, can_be_empty=self._can_be_empty)
        self._supervisor.orders.put(order)

    def _require_thread(self) -> threading.Thread:
        assert self._thread is not None, "launch first"
        return self._thread

    def _raise_error(self) -> None:
        error = self._supervisor.error
        if isinstance(error, PdserveError):
            raise error
        if error is not None:
            raise InternalError(f"the supervisor failed: {error!r}") from error
