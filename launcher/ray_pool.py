"""Replicas as actors of a Ray cluster, for the same supervisor that watches local ones.

The launcher itself never imports Ray. A keeper and a driver process do, so that a dead raylet costs
a restart of that pair, and not the launcher, its router or its Redis:

    launcher -> keeper -> driver, gcs_server, raylet -> actor -> face -> ranks

Each arrow is a parent whose end ends the child.
"""

import importlib.util
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import PIPE
from urllib.parse import urlsplit

import launcher
from launcher.place import Child, OutputReader
from launcher.ray_messages import (
    DrainFace,
    FaceEnded,
    FaceLine,
    FaceStarted,
    FlipFace,
    KillFace,
    Message,
    StartFace,
    decode,
    encode,
)
from pdserve.config.engine import EngineConfig
from pdserve.errors import ConfigError
from pdserve.process import ChildProcess, spawn
from pdserve.request import Role
from pdserve.rpc.channel import BlockingChannel, ChannelClosed, make_pair

_KILL_TIMEOUT_S = 10.0
_CLOSE_TIMEOUT_S = 5.0
_MAX_LINE_CHARS = 300
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, kw_only=True, slots=True)
class RayConfig:
    """Which Ray cluster, and how much of it."""

    address: str | None = None
    """Of a running cluster; None starts one of our own, on loopback."""
    num_cpus: int = field(default_factory=lambda: max(os.cpu_count() or 1, 16))
    """Slots for ranks in a cluster of our own; may exceed the machine's cores."""
    has_dashboard: bool = False
    is_anywhere: bool = False
    """Replicas may be on any node, and listen on its address; else they stay on this machine."""
    has_pools: bool = False
    """Replicas of a role go where Ray's custom resource `pdserve_<role>` is, and nowhere else."""


class RayPlace:
    """Starts faces in Ray actors. The Ray cluster comes with the first face."""

    def __init__(
        self,
        config: RayConfig,
        *,
        report: Callable[[str], None],
        engines: Mapping[Role, EngineConfig] | None = None,
    ) -> None:
        """Starts nothing yet.

        Args:
            config: which cluster.
            report: takes Ray's lines, from another thread.
            engines: of each role that has replicas of several ranks, or on GPUs.

        Raises:
            ConfigError: Ray is not installed.
        """
        if importlib.util.find_spec("ray") is None:
            raise ConfigError("--launcher ray needs Ray: pip install 'pdserve[ray]'")
        self._config = config
        self._report = report
        self._engines = dict(engines or {})
        self._session: _Session | None = None
        self._num_lives = 0

    @property
    def keeper_pid(self) -> int | None:
        """Process above all of Ray's, while it runs."""
        return None if self._session is None else self._session.pid

    def start(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        on_line: Callable[[str], None],
        stages: Sequence[Sequence[str]] = (),
    ) -> Child:
        """Orders actors; the child has a pid once Ray has placed them."""
        if self._session is None or not self._session.is_running():
            if self._session is not None:
                self._session.close()
            self._session = _Session(self._config, self._report)
        self._num_lives += 1
        role = Role(name.rpartition("-")[0])
        engine = self._engines.get(role)
        tensor, num_ranks = (
            (1, 1) if engine is None else (engine.tensor_parallel, engine.num_ranks)
        )  # fmt: skip
        order = StartFace(
            life=self._num_lives,
            name=name,
            argv=tuple(argv),
            env=dict(env),
            ranks_of_bundles=(tensor,) * (1 + len(stages)) if stages else (num_ranks,),
            uses_gpus=engine is not None and engine.device == "cuda",
            is_anywhere=self._config.is_anywhere,
            stages=tuple(tuple(stage) for stage in stages),
            resource=f"pdserve_{role}" if self._config.has_pools else None,
        )
        return self._session.start(order, on_line)

    def close(self) -> None:
        """Ends a Ray cluster of our own, or leaves somebody else's."""
        if self._session is not None:
            self._session.close()


class RayChild:
    """A face in an actor; what is known of it comes from the session's thread."""

    def __init__(self, life: int, session: "_Session", on_line: Callable[[str], None]) -> None:
        """Knows nothing yet."""
        self._life = life
        self._session = session
        self.on_line = on_line
        self.pid: int | None = None
        self.status: int | None = None
        self.has_ended = threading.Event()

    def poll(self) -> int | None:
        """Returns the exit status; None while it is placed or runs."""
        return self.status

    def terminate(self) -> None:
        """Asks the face to drain and end."""
        self._session.send(DrainFace(life=self._life))

    def flip(self) -> None:
        """Asks the face to drain and go on in the other pool, in the actor that it has."""
        self._session.send(FlipFace(life=self._life))

    def kill(self) -> None:
        """Kills the actor, and with it the face."""
        if self.status is None:
            self._session.send(KillFace(life=self._life))
            self.has_ended.wait(_KILL_TIMEOUT_S)

    def wait_output(self, timeout_s: float) -> None:
        """Waits for the last line: lines come before the end."""
        self.has_ended.wait(timeout_s)

    def end(self, status: int) -> None:
        """Notes the end; only the session calls."""
        self.pid = None
        self.status = status
        self.has_ended.set()


class _Session:
    """One keeper with its driver, and the children that it was told to start."""

    def __init__(self, config: RayConfig, report: Callable[[str], None]) -> None:
        ours, theirs = make_pair()
        self._children: dict[int, RayChild] = {}
        self._lock = threading.Lock()
        """Of `_children` and `_is_over`: a child is either told of the end or never added."""
        self._is_over = False
        self._last_line = "it said nothing"
        self._report = report
        self._keeper: ChildProcess = spawn(
            keeper_command(config, theirs.fileno()),
            pass_fds=(theirs.fileno(),),
            env=_environment(config),
            stdout=PIPE,
            name="ray",
        )
        theirs.close()
        self._output = OutputReader(self._keeper, self._take_line)
        self._is_guest = config.address is not None
        self._socket = ours
        self._channel = BlockingChannel(ours)
        self._reader = threading.Thread(target=self._receive, name="ray-events", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int | None:
        return self._keeper.pid if self.is_running() else None

    def is_running(self) -> bool:
        return not self._is_over and self._keeper.poll() is None

    def start(self, order: StartFace, on_line: Callable[[str], None]) -> RayChild:
        child = RayChild(order.life, self, on_line)
        with self._lock:
            if not self._is_over:
                self._children[order.life] = child
        if order.life in self._children:
            self.send(order)
        else:
            child.end(-9)
        return child

    def send(self, message: Message) -> None:
        # A driver that is gone has taken its children along; the reader tells them.
        with suppress(ChannelClosed):
            self._channel.send(encode(message))

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._is_guest:
            # Time for the driver to take its leave.
            with suppress(TimeoutError):
                self._keeper.wait(_CLOSE_TIMEOUT_S)
        self._keeper.stop(_CLOSE_TIMEOUT_S)
        self._reader.join(_CLOSE_TIMEOUT_S)
        self._channel.close()

    def _take_line(self, line: str) -> None:
        # The indented rest of a message of Ray's is a dump of its own log.
        if line and not line.startswith(" "):
            self._last_line = line[:_MAX_LINE_CHARS]
            self._report(f"[ray] {self._last_line}")

    def _receive(self) -> None:
        with suppress(ChannelClosed):
            while True:
                self._handle(decode(self._channel.receive()))
        with self._lock:
            self._is_over = True
            left = list(self._children.values())
        # The keeper ends last, when nothing is left of the actors: their successors find room.
        with suppress(TimeoutError):
            self._keeper.wait(_CLOSE_TIMEOUT_S)
        self._output.join(1.0)
        status = self._keeper.poll()
        for child in left:
            if child.status is None:
                what = "error:" if status == 2 else "Ray ended:"
                child.on_line(f"{what} {self._last_line}")
                child.end(2 if status == 2 else -9)

    def _handle(self, message: Message) -> None:
        match message:
            case FaceStarted():
                self._children[message.life].pid = message.pid
            case FaceLine():
                self._children[message.life].on_line(message.text)
            case FaceEnded():
                self._children.pop(message.life).end(message.status)
            case _:
                raise AssertionError(f"no event: {message}")


def keeper_command(config: RayConfig, channel_fd: int) -> tuple[str, ...]:
    """Returns what starts the keeper, and what it tells the driver."""
    argv = [sys.executable, "-m", "launcher.roles.ray_keeper"]
    argv += ["--channel-fd", str(channel_fd), "--num-cpus", str(config.num_cpus)]
    argv += ["--dashboard"] if config.has_dashboard else []
    argv += [] if config.address is None else ["--address", config.address]
    return tuple(argv)


def _environment(config: RayConfig) -> dict[str, str]:
    # Ray's workers import this program wherever it was started from.
    home = str(Path(launcher.__file__).parent.parent)
    path = os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH")]))
    variables = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_COLOR_PREFIX": "0",
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
    }
    if config.address is None or urlsplit(f"//{config.address}").hostname in _LOOPBACK:
        # On Linux Ray turns 127.0.0.1 into the machine's outer address and listens on all of them,
        # unless clusters of several machines are switched off by this name (ray 2.60).
        variables["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    return variables
