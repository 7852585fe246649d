"""A whole cluster as child processes of this one: Redis, prefill and decode replicas, a router.

new -> starting -> ready -> draining -> stopped; a failed start goes straight to stopped.

One supervising thread spawns every child and outlives them all, because the kernel ties a child's
parent-death signal to the thread that spawned it. Other threads, and signal handlers, only set
`_stop_level` and read; they never wait on a lock.
"""

import asyncio
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self
from urllib.parse import urlsplit

import grpc

from launcher.model_source import resolve_model
from launcher.redis_server import RedisServer, free_port
from launcher.replica import Replica, describe_status
from launcher.supervision import LeaseWatch
from pdserve.config.cluster import ClusterConfig
from pdserve.config.load import to_argv
from pdserve.config.router import RouterConfig
from pdserve.config.worker import WorkerConfig
from pdserve.errors import ConfigError, InternalError, PdserveError
from pdserve.registry.base import RegistryUnavailable, WorkerRecord
from pdserve.registry.redis import RedisRegistry
from pdserve.request import Role
from pdserve.rpc.v1 import inference_pb2, inference_pb2_grpc

ROLE_COMMAND = (sys.executable, "-m", "launcher.roles")
"""Followed by `router`, `prefill-worker` or `decode-worker` and that role's flags."""
_POLL_S = 0.05
_KILL_AFTER_DRAIN_S = 5.0
"""A child that overstays its own drain time-out by this long is killed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """A replica as the launcher sees it."""

    worker_id: str
    role: Role
    face_pid: int | None
    """None between an end and the restart."""
    num_restarts: int
    record: WorkerRecord | None
    """What it registered; None while it is starting, frozen or gone."""


class LocalCluster:
    """Starts, watches and stops a cluster on this machine."""

    def __init__(
        self,
        config: ClusterConfig,
        *,
        cluster: str | None = None,
        report: Callable[[str], None] | None = None,
        role_command: Sequence[str] = ROLE_COMMAND,
    ) -> None:
        """Starts nothing yet.

        Args:
            config: pools, engine and addresses; port 0 takes a free one.
            cluster: name in the registry; made up if absent, so that clusters never mix.
            report: takes phase lines and the children's lines, from any thread.
            role_command: what starts a role; tests put stand-ins here.
        """
        self._config = config
        self._cluster = cluster or f"local-{secrets.token_hex(4)}"
        self._report = report or (lambda _: None)
        self._role_command = tuple(role_command)
        self._redis: RedisServer | None = None
        self._router: Replica | None = None
        self._workers: dict[str, tuple[Role, Replica]] = {}
        self._records: dict[str, WorkerRecord] = {}
        self._host = config.host
        self._port = config.port or free_port(config.host)
        self._metrics_port = config.metrics_port or free_port(config.host)
        self._is_ready = False
        self._stop_level: Literal[0, 1, 2] = 0
        self._error: Exception | None = None
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
    def metrics_address(self) -> str:
        """host:port of the router's metrics."""
        return f"{self._host}:{self._metrics_port}"

    @property
    def redis_url(self) -> str:
        """The registry's store, private or given."""
        if self._redis is not None:
            return self._redis.url
        assert self._config.redis_url is not None, "a private Redis exists once started"
        return self._config.redis_url

    @property
    def redis(self) -> RedisServer | None:
        """The private redis-server; None if one was given by URL."""
        return self._redis

    @property
    def router_pid(self) -> int | None:
        """Process id of the router while it runs."""
        return None if self._router is None else self._router.pid

    def members(self) -> tuple[Member, ...]:
        """Returns all replicas, prefill first, with their pids and records."""
        records = self._records
        return tuple(
            Member(
                worker_id=name,
                role=role,
                face_pid=worker.pid,
                num_restarts=worker.num_restarts,
                record=records.get(name),
            )
            for name, (role, worker) in self._workers.items()
        )

    def member(self, worker_id: str) -> Member:
        """Returns one replica; KeyError for an unknown id."""
        for member in self.members():
            if member.worker_id == worker_id:
                return member
        raise KeyError(worker_id)

    def pids(self) -> tuple[int, ...]:
        """Returns every process of the cluster that is known to run."""
        found = [self.router_pid, None if self._redis is None else self._redis.pid]
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
        while thread.is_alive() and not self._is_ready:
            thread.join(_POLL_S)
        self._raise_error()
        return self._is_ready

    def wait(self) -> None:
        """Waits until the cluster has stopped; raises what made it stop by itself."""
        thread = self._require_thread()
        while thread.is_alive():
            thread.join(_POLL_S)
        self._raise_error()

    def request_stop(self, *, now: bool = False) -> None:
        """Begins to drain, or with `now` to kill; safe in a signal handler."""
        self._stop_level = 2 if now or self._stop_level == 2 else 1

    def stop(self, *, now: bool = False) -> None:
        """Drains (or with `now` kills) everything and waits for the end."""
        self.request_stop(now=now)
        if self._thread is not None:
            self.wait()

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

    # Below: the supervising thread.

    def _run(self) -> None:
        try:
            with asyncio.Runner() as runner:
                registry = self._bring_up(runner)
                try:
                    self._await_members(runner, registry)
                    while self._stop_level == 0:
                        self._watch(runner, registry)
                        time.sleep(_POLL_S)
                finally:
                    runner.run(registry.close())
        except Exception as error:  # noqa: BLE001 - kept for the thread that waits
            self._error = error
        finally:
            self._tear_down()

    def _bring_up(self, runner: asyncio.Runner) -> RedisRegistry:
        config = self._config
        require_free_port(self._host, self._port)
        with self._phase("model"):
            folder = resolve_model(
                config.engine.model,
                needs_weights=config.engine.load_format != "dummy",
                report=self._report,
            )
        if config.redis_url is None:
            self._redis = RedisServer()
            with self._phase("redis"):
                self._redis.start()
        registry = RedisRegistry(self.redis_url, self._cluster)
        try:
            runner.run(registry.list_workers())
        except (RegistryUnavailable, ValueError) as error:
            where = urlsplit(self.redis_url)
            raise ConfigError(f"Redis at {where.hostname}:{where.port} does not answer") from error
        for role, count in ((Role.PREFILL, config.num_prefill), (Role.DECODE, config.num_decode)):
            for index in range(count):
                name = f"{role}-{index}"
                self._workers[name] = (role, self._new_worker(name, role, folder))
        self._router = self._new_router(folder)
        for replica_ in (self._router, *(worker for _, worker in self._workers.values())):
            replica_.start()
        return registry

    def _new_worker(self, name: str, role: Role, folder: Path) -> Replica:
        config = self._config
        faults = config.prefill_faults if role is Role.PREFILL else config.decode_faults
        worker = WorkerConfig(
            role=role,
            worker_id=name,
            engine=replace(config.engine, model=str(folder)),
            host=self._host,
            redis_url=self.redis_url,
            cluster=self._cluster,
            max_local_prefill_tokens=config.max_local_prefill_tokens,
            drain_timeout_s=config.drain_timeout_s,
            handoff=config.handoff,
            faults=faults,
        )

        def new_watch(now_s: float) -> LeaseWatch:
            return LeaseWatch(worker.registry_lease_s, config.ready_timeout_s, now_s)

        flags = to_argv(worker, without=("role", "redis_url"))
        return self._new_replica(name, [f"{role}-worker", *flags], new_watch)

    def _new_router(self, folder: Path) -> Replica:
        config = self._config
        router = RouterConfig(
            model=str(folder),
            redis_url=self.redis_url,
            served_model_name=config.served_model_name or config.engine.model,
            host=self._host,
            port=self._port,
            metrics_port=self._metrics_port,
            cluster=self._cluster,
            block_size=config.engine.block_size,
            max_model_len=config.engine.max_model_len,
            drain_timeout_s=config.drain_timeout_s,
        )
        return self._new_replica("router", ["router", *to_argv(router, without=("redis_url",))])

    def _new_replica(
        self,
        name: str,
        arguments: Sequence[str],
        new_watch: Callable[[float], LeaseWatch] | None = None,
    ) -> Replica:
        # By variable and not by flag: a URL may hold a password, and ps shows flags to everybody.
        env = {"PDSERVE_REDIS": self.redis_url, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        return Replica(name, [*self._role_command, *arguments], env, self._report, new_watch)

    def _await_members(self, runner: asyncio.Runner, registry: RedisRegistry) -> None:
        deadline_s = time.monotonic() + self._config.ready_timeout_s
        with self._phase("workers and router"):
            while self._stop_level == 0:
                self._require_all_running()
                self._refresh(runner, registry)
                if len(self._records) == len(self._workers) and self._router_sees_all():
                    self._is_ready = True
                    return
                if time.monotonic() > deadline_s:
                    missing = sorted(set(self._workers) - set(self._records)) or ["router"]
                    raise InternalError(
                        f"not ready after {self._config.ready_timeout_s:g} s: {', '.join(missing)}"
                    )
                time.sleep(_POLL_S)

    def _require_all_running(self) -> None:
        for child in self._replicas():
            status = child.poll()
            if status == 2:
                raise ConfigError(child.last_line())
            if status is not None:
                raise InternalError(
                    f"{child.name} ended ({describe_status(status)}) before it was ready: "
                    f"{child.last_line()}"
                )

    def _router_sees_all(self) -> bool:
        with grpc.insecure_channel(self.address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            try:
                info = stub.GetServerInfo(inference_pb2.GetServerInfoRequest(), timeout=1.0)
            except grpc.RpcError:
                return False
        config = self._config
        return info.num_prefill >= config.num_prefill and info.num_decode >= config.num_decode

    def _watch(self, runner: asyncio.Runner, registry: RedisRegistry) -> None:
        if self._redis is not None and not self._redis.is_running():
            self._report("redis-server ended; starting it again")
            self._redis.start()
        self._refresh(runner, registry)
        now_s = time.monotonic()
        for child in self._replicas():
            child.revive(now_s)

    def _refresh(self, runner: asyncio.Runner, registry: RedisRegistry) -> None:
        watches = {name: worker.watch for name, (_, worker) in self._workers.items()}
        now_s = time.monotonic()
        try:
            found = runner.run(registry.list_workers())
        except RegistryUnavailable:
            for watch in watches.values():
                if watch is not None:
                    watch.observe_outage(now_s)
            return
        # A record of the process that runs now: the lease of a dead predecessor may still hold.
        records = {
            str(record.worker_id): record
            for record in found
            if record.worker_id in self._workers
            and record.face_pid == self._workers[record.worker_id][1].pid
        }
        for name, watch in watches.items():
            if watch is not None:
                watch.observe(now_s, is_registered=name in records)
        self._records = records

    def _replicas(self) -> tuple[Replica, ...]:
        workers = tuple(worker for _, worker in self._workers.values())
        return workers if self._router is None else (self._router, *workers)

    def _tear_down(self) -> None:
        # The router first: it refuses new work and finishes its streams while workers still serve.
        if self._stop_level == 1 and self._error is None:
            if self._router is not None:
                self._drain((self._router,))
            self._drain(tuple(worker for _, worker in self._workers.values()))
        for child in self._replicas():
            child.kill()
        if self._redis is not None:
            self._redis.kill()
        self._records = {}

    def _drain(self, children: Sequence[Replica]) -> None:
        for child in children:
            child.terminate()
        deadline_s = time.monotonic() + self._config.drain_timeout_s + _KILL_AFTER_DRAIN_S
        while any(child.poll() is None for child in children):
            if self._stop_level == 2 or time.monotonic() > deadline_s:
                return
            time.sleep(_POLL_S)

    def _phase(self, name: str) -> "_Phase":
        return _Phase(name, self._report)

    def _require_thread(self) -> threading.Thread:
        assert self._thread is not None, "launch first"
        return self._thread

    def _raise_error(self) -> None:
        if self._error is None:
            return
        if isinstance(self._error, PdserveError):
            raise self._error
        raise InternalError(f"the supervisor failed: {self._error!r}") from self._error


class _Phase:
    """Reports how long a phase took."""

    def __init__(self, name: str, report: Callable[[str], None]) -> None:
        self._name = name
        self._report = report
        self._started_s = 0.0

    def __enter__(self) -> None:
        self._started_s = time.monotonic()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._report(f"{self._name} ready after {time.monotonic() - self._started_s:.1f} s")


def require_free_port(host: str, port: int) -> None:
    """Checks that a port can be bound.

    Raises:
        ConfigError: it is in use, or the host is not ours.
    """
    try:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
