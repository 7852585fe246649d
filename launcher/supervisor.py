"""Starts, watches and stops all children of a local cluster, on one thread of its own.

new -> starting -> ready -> draining -> stopped; a failed start goes straight to stopped.

One thread spawns every child and outlives them all, because the kernel ties a child's parent-death
signal to the thread that spawned it. Other threads, and signal handlers, only set `stop_level` and
read public attributes, each replaced as a whole; nobody waits on a lock.
"""

import asyncio
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from queue import SimpleQueue
from typing import Literal
from urllib.parse import urlsplit

from launcher.gpus import GpuDealer
from launcher.model_source import resolve_model
from launcher.place import LocalPlace, Place
from launcher.pool import Flip, Member, Order, plan_size
from launcher.redis_server import RedisServer
from launcher.replica import Replica, describe_status
from launcher.role_commands import (
    HIDDEN_FIELDS,
    Ports,
    Site,
    environment_of,
    router_config,
    stage_argvs,
    worker_argv,
    worker_configs,
)
from launcher.router_probe import router_sees_all
from launcher.supervision import STOOD_STILL_S, LeaseWatch
from pdserve.config.cluster import ClusterConfig
from pdserve.config.load import read_visible_gpus, to_argv
from pdserve.config.worker import WorkerConfig
from pdserve.errors import ConfigError, InternalError
from pdserve.registry.base import RegistryUnavailable, WorkerRecord
from pdserve.registry.redis import RedisRegistry
from pdserve.request import Role
from pdserve.rpc.server import check_port_is_free, resolve_host
from pdserve.timeline import PauseWatch

POLL_S = 0.05
_REFUSAL = re.compile(r"\[[^\]]*\] error: ")
_WATCH_S = 0.2
_CUT_S = 3.0
"""For the router's last words to its clients in a forced stop."""
_KILL_AFTER_DRAIN_S = 5.0
"""A child that overstays its own drain time-out by this long is killed."""


class Supervisor:
    """The children of one cluster; `run` is the body of its thread."""

    def __init__(
        self,
        config: ClusterConfig,
        *,
        name: str,
        ports: Ports,
        role_command: Callable[[str], Sequence[str]],
        place: Place,
        report: Callable[[str], None],
    ) -> None:
        """Starts nothing; `report` takes phase lines and the children's lines."""
        self._config = config
        self._name = name
        self._ports = ports
        self._place = place
        self._role_command = role_command
        self._report = report
        self.redis: RedisServer | None = None
        self.redis_url = config.redis_url
        self.router: Replica | None = None
        self.workers: dict[str, tuple[WorkerConfig, Replica]] = {}
        self._models: dict[Role, WorkerConfig] = {}
        """What a new replica of a pool is a copy of."""
        # Whatever places replicas elsewhere deals out the GPUs there.
        self._gpus = GpuDealer(read_visible_gpus()) if isinstance(place, LocalPlace) else None
        self.records: dict[str, WorkerRecord] = {}
        self._own_pause = PauseWatch(STOOD_STILL_S, time.monotonic())
        self.orders: SimpleQueue[Order] = SimpleQueue()
        """From any thread, for this one."""
        self.is_ready = False
        self.stop_level: Literal[0, 1, 2] = 0
        """1 drains, 2 kills."""
        self.error: Exception | None = None

    def members(self) -> tuple[Member, ...]:
        """Returns all replicas, oldest first; any thread may call."""
        records = self.records
        return tuple(
            Member(
                worker_id=name,
                role=config.role,
                face_pid=worker.pid,
                num_restarts=worker.num_restarts,
                is_draining=worker.is_retiring,
                record=records.get(name),
            )
            for name, (config, worker) in self.workers.items()
        )

    def run(self) -> None:
        """Lives from start to stop; leaves no process, and what went wrong in `error`."""
        try:
            with asyncio.Runner() as runner:
                registry = self._bring_up(runner)
                try:
                    self._await_members(runner, registry)
                    while self.stop_level == 0:
                        self._watch(runner, registry)
                        self._pause(_WATCH_S)
                finally:
                    runner.run(registry.close())
        except Exception as error:  # noqa: BLE001 - this thread's edge; whoever waits raises it
            self.error = error
        finally:
            self._tear_down()

    def _bring_up(self, runner: asyncio.Runner) -> RedisRegistry:
        config = self._config
        if self._gpus is not None:
            self._gpus.check(config)
        address = resolve_host(config.host)
        check_port_is_free(address, self._ports.grpc)
        check_port_is_free(address, self._ports.metrics, "metrics_port")
        if not config.no_http:
            check_port_is_free(address, self._ports.http, "http_port")
        with self._phase("model"):
            folder = resolve_model(
                config.engine.model,
                needs_weights=config.engine.load_format != "dummy",
                report=self._report,
            )
        if config.redis_url is None:
            self.redis = RedisServer()
            self.redis_url = self.redis.url
            with self._phase("redis"):
                self.redis.start()
        assert self.redis_url is not None
        registry = self._connect(runner, self.redis_url)
        site = Site(
            name=self._name,
            host=config.host,
            port=self._ports.grpc,
            http_port=self._ports.http,
            metrics_port=self._ports.metrics,
            folder=folder,
            redis_url=self.redis_url,
            secret=secrets.token_hex(32),
        )
        self.workers = {w.worker_id: (w, self._new_worker(w)) for w in worker_configs(config, site)}
        self._models = {worker.role: worker for worker, _ in self.workers.values()}
        router = router_config(config, site)
        role = "router" if router.fronts == 1 else "router-group"
        self.router = Replica(
            "router",
            [*self._role_command(role), *to_argv(router, without=HIDDEN_FIELDS)],
            environment_of(router),
            self._report_child,
            place=LocalPlace(),
        )
        for child in self._children():
            child.start()
        return registry

    def _connect(self, runner: asyncio.Runner, url: str) -> RedisRegistry:
        try:
            registry = RedisRegistry(url, self._name)
            runner.run(registry.list_workers())
        except (RegistryUnavailable, ValueError) as error:
            # Not the whole URL: it may hold a password.
            where = urlsplit(url).netloc.rpartition("@")[2] or "the given URL"
            raise ConfigError(f"Redis at {where} does not answer") from error
        return registry

    def _new_worker(self, worker: WorkerConfig) -> Replica:
        def new_watch(now_s: float) -> LeaseWatch:
            return LeaseWatch(worker.registry_lease_s, self._config.ready_timeout_s, now_s)

        return Replica(
            worker.worker_id,
            worker_argv(worker, self._role_command),
            {**environment_of(worker), **({} if self._gpus is None else self._gpus.deal(worker))},
            self._report_child,
            new_watch,
            place=self._place,
            stages=stage_argvs(worker, self._role_command),
        )

    def _report_child(self, line: str) -> None:
        # What ends the start is told once, as its error, and not by every replica.
        if self.is_ready or _REFUSAL.match(line) is None:
            self._report(line)

    def _name_decode_flag(self, child: Replica) -> str:
        """Returns a child's refusal; decode replicas may have flags of their own."""
        text = child.last_line().removeprefix("error: ")
        config = self.workers[child.name][0] if child.name in self.workers else None
        if config is not None and config.role is Role.DECODE:
            own = {
                "--tensor-parallel-size": self._config.decode_tensor_parallel,
                "--pipeline-parallel-size": self._config.decode_pipeline_parallel,
            }
            flag = text.partition(" ")[0]
            if own.get(flag) is not None:
                return text.replace("--", "--decode-", 1)
        return text

    def _await_members(self, runner: asyncio.Runner, registry: RedisRegistry) -> None:
        started_s = time.monotonic()
        limit_s = self._config.ready_timeout_s
        while self.stop_level == 0:
            self._require_all_running()
            self._refresh(runner, registry)
            lived_s = time.monotonic() - started_s
            if len(self.records) == len(self.workers) and router_sees_all(
                self._ports.grpc, self._config
            ):
                self._report(f"workers and router ready after {lived_s:.1f} s")
                self.is_ready = True
                return
            if lived_s > limit_s:
                missing = sorted(set(self.workers) - set(self.records)) or ["router"]
                raise InternalError(f"not ready after {limit_s:g} s: {', '.join(missing)}")
            time.sleep(POLL_S)

    def _require_all_running(self) -> None:
        for child in self._children():
            status = child.poll()
            if status == 2:
                raise ConfigError(self._name_decode_flag(child))
            if status is not None:
                raise InternalError(
                    f"{child.name} ended ({describe_status(status)}) before it was ready: "
                    f"{child.last_line()}"
                )

    def _watch(self, runner: asyncio.Runner, registry: RedisRegistry) -> None:
        if self.redis is not None and not self.redis.is_running():
            self._report("redis-server ended; starting it again")
            try:
                self.redis.start()
            except ConfigError as error:
                # The cluster serves on without it; the next round tries again.
                self._report(f"{error}; trying again")
        self._refresh(runner, registry)
        while not self.orders.empty():
            self._carry_out(self.orders.get())
        now_s = time.monotonic()
        for child in self._children():
            child.revive(now_s)
        self.workers = {
            name: (config, worker)
            for name, (config, worker) in self.workers.items()
            if not worker.is_retiring or worker.poll() is None
        }
        if self._gpus is not None:
            self._gpus.keep(self.workers)

    def _carry_out(self, order: Order) -> None:
        if isinstance(order, Flip):
            self._flip(order)
            return
        plan = plan_size(self.members(), order)
        until_s = time.monotonic() + self._config.drain_timeout_s + _KILL_AFTER_DRAIN_S
        for name in plan.retired:
            self._report(f"{name} drains for good")
            self.workers[name][1].retire(until_s)
        workers = dict(self.workers)
        for name in plan.added:
            config = replace(self._models[Role(name.rpartition("-")[0])], worker_id=name)
            workers[name] = (config, self._new_worker(config))
            workers[name][1].start()
        self.workers = workers

    def _flip(self, order: Flip) -> None:
        config, worker = self.workers.get(order.worker_id, (None, None))
        if config is None or worker is None or worker.is_retiring or config.role is order.role:
            return
        if order.worker_id not in self.records:
            # It starts, or is about to be restarted: as what it was, for now.
            self._report(f"{order.worker_id} does not serve yet: it stays a {config.role} replica")
            return
        config = replace(config, role=order.role)
        self._report(f"{order.worker_id} drains to become a {order.role} replica")
        worker.flip(worker_argv(config, self._role_command))
        # What it has registered so far is of its old role.
        self.records = {n: r for n, r in self.records.items() if n != order.worker_id}
        self.workers = {**self.workers, order.worker_id: (config, worker)}

    def _refresh(self, runner: asyncio.Runner, registry: RedisRegistry) -> None:
        watches = {name: worker.watch for name, (_, worker) in self.workers.items()}
        try:
            found = runner.run(registry.list_workers())
        except RegistryUnavailable:
            found = None
        now_s = time.monotonic()
        if self._own_pause.look(now_s) or found is None:
            for watch in watches.values():
                if watch is not None:
                    watch.observe_outage(now_s)
        if found is None:
            return
        # A record of the process that runs now: the lease of a dead predecessor may still hold.
        alive = {
            str(record.worker_id): record
            for record in found
            if record.worker_id in self.workers
            and record.face_pid == self.workers[record.worker_id][1].pid
        }
        for name, watch in watches.items():
            if watch is not None:
                watch.observe(now_s, is_registered=name in alive)
        # One that flips drains under its old role: it does not serve in its new one yet.
        self.records = {
            name: record
            for name, record in alive.items()
            if record.role is self.workers[name][0].role
        }

    def _children(self) -> tuple[Replica, ...]:
        workers = tuple(worker for _, worker in self.workers.values())
        return workers if self.router is None else (self.router, *workers)

    def _tear_down(self) -> None:
        # The router first: it refuses new work and finishes its streams while workers still serve.
        workers = tuple(worker for _, worker in self.workers.values())
        if self.stop_level == 1 and self.error is None:
            if self.router is not None:
                # Its streams may need a worker that dies meanwhile, or died a moment ago.
                self._drain((self.router,), revived=workers)
            if self.stop_level == 1:
                self._drain(workers)
            elif self.router is not None:
                self._cut_streams(self.router)
        elif self.stop_level == 2 and self.router is not None:
            self._cut_streams(self.router)
        for child in self._children():
            child.kill()
        self._place.close()
        if self.redis is not None:
            self.redis.close()
        self.records = {}

    def _drain(self, children: Sequence[Replica], revived: Sequence[Replica] = ()) -> None:
        for child in children:
            child.terminate()
        deadline_s = time.monotonic() + self._config.drain_timeout_s + _KILL_AFTER_DRAIN_S
        while any(child.poll() is None for child in children):
            if self.stop_level == 2:
                return
            for other in revived:
                if other.poll() is not None:
                    other.revive(time.monotonic())
            if time.monotonic() > deadline_s:
                for child in children:
                    if child.poll() is None:
                        self._report(f"{child.name} overstays its drain: killing it")
                        child.kill()
                return
            time.sleep(POLL_S)

    def _cut_streams(self, router: Replica) -> None:
        """Lets the router tell its clients that it stops: two signals, for the first one drains."""
        deadline_s = time.monotonic() + _CUT_S
        while router.poll() is None and time.monotonic() < deadline_s:
            router.terminate()
            time.sleep(2 * POLL_S)

    def _pause(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while self.stop_level == 0 and time.monotonic() < until_s:
            time.sleep(POLL_S)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        started_s = time.monotonic()
        yield
        self._report(f"{name} ready after {time.monotonic() - started_s:.1f} s")
