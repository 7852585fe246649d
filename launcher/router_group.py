"""Several router fronts that share their ports, and the brain that chooses for all of them.

    this process --+-- brain      (one: index, load book, predictor, turns; /metrics)
                   +-- front-0    (each: gRPC and HTTP on the shared ports, streams of its clients)
                   +-- front-1

Whoever ends is started again, and who gives no sign of life is killed. SIGTERM drains: the
fronts first, for their streams may need the brain to the end. A second one cuts them.
"""

import re
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from types import FrameType

from launcher.held_port import HeldPort
from launcher.place import LocalPlace
from launcher.replica import Replica, describe_status
from launcher.role_commands import HIDDEN_FIELDS, Ports, environment_of, role_command
from launcher.supervision import STOOD_STILL_S, LeaseWatch
from pdserve.config.load import tell_by_flags, to_argv
from pdserve.config.router import RouterConfig
from pdserve.errors import ConfigError, InternalError
from pdserve.line_output import write_line
from pdserve.rpc.server import bind_shared_port
from pdserve.timeline import PauseWatch
from router.brain.pulse import feel_pulse
from router.run_settings import EXIT_CONFIG, front_name

POLL_S = 0.05
PULSE_S = 0.5
"""How often the brain is asked for signs of life, and how long for them is waited."""
LEASE = 2.0
"""Of a sign of life, in silences that fronts bear of their brain; who gives none for several of
these is killed."""
START_TIMEOUT_S = 60.0
_OVERSTAY_S = 5.0
"""A front that overstays its own drain time-out by this long is killed."""
_READY = re.compile(r"\[(\S+)\] (?:router|brain) ready: (.*)")
_REFUSAL = re.compile(r"\[\S+\] error: ")


class RouterGroup:
    """The children of one router. One thread."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        folder: Path,
        ports: Ports,
        report: Callable[[str], None],
        command_of: Callable[[str], Sequence[str]] = role_command,
    ) -> None:
        """Starts nothing.

        Args:
            config: of the router; `fronts` says how many.
            folder: this user's alone, for the brain's socket.
            ports: the same over restarts; those of gRPC and HTTP may be shared.
            report: takes the children's lines, from any thread.
            command_of: what starts a role.
        """
        self._config = config
        self._report = report
        self._ready: dict[str, str] = {}
        """What children said when they were."""
        self.is_ready = False
        self.num_signals = 0
        """A handler counts them."""
        self._next_pulse_s = 0.0
        self._own_pause = PauseWatch(STOOD_STILL_S, time.monotonic())
        shared = replace(
            config,
            fronts=1,
            port=ports.grpc,
            http_port=ports.http,
            metrics_port=ports.metrics,
            brain_socket=str(folder / "brain"),
            cluster_secret=config.cluster_secret or secrets.token_hex(32),
        )
        assert shared.brain_socket is not None
        self._socket = shared.brain_socket

        def new_watch(now_s: float) -> LeaseWatch:
            return LeaseWatch(LEASE * config.brain_silence_s, START_TIMEOUT_S, now_s)

        def child(name: str, role: str, own: RouterConfig) -> Replica:
            return Replica(
                name,
                [*command_of(role), *to_argv(own, without=HIDDEN_FIELDS)],
                environment_of(own),
                self._take_line,
                new_watch,
                place=LocalPlace(),
            )

        # It lets no client in.
        secretless = replace(shared, api_keys=(), api_keys_file=None, cluster_secret=None)
        self.brain = child("brain", "brain", secretless)
        self.fronts = tuple(
            child(front_name(number), "router", replace(shared, front_number=number))
            for number in range(config.fronts)
        )

    def run(self) -> None:
        """Lives until it was told to end and all fronts have; leaves no process.

        Raises:
            ConfigError: something the user can mend.
            InternalError: a child ended or did not get ready.
        """
        try:
            for child in self._children():
                child.start()
            if self._await_ready():
                self._watch()
            self._drain()
        finally:
            for child in self._children():
                child.kill()

    def where(self) -> str:
        """Says where the router listens; once it is ready."""
        return f"{self._ready[front_name(0)]}, {self._ready['brain']}"

    def _await_ready(self) -> bool:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not self.num_signals:
            for child in self._children():
                status = child.poll()
                if status == 2:
                    raise ConfigError(child.last_line().removeprefix("error: "))
                if status is not None:
                    text = f"{child.name} ended ({describe_status(status)}): {child.last_line()}"
                    raise InternalError(text)
            if len(self._ready) == len(self._children()):
                self.is_ready = True
                write_line(sys.stdout, f"router ready: {self.where()}")
                return True
            if time.monotonic() > deadline_s:
                raise InternalError(f"not ready after {START_TIMEOUT_S:g} s")
            time.sleep(POLL_S)
        return False

    def _watch(self) -> None:
        while not self.num_signals:
            now_s = time.monotonic()
            self._forgive(now_s)
            self._feel_pulse(now_s)
            for child in self._children():
                child.revive(now_s)
            time.sleep(POLL_S)

    def _feel_pulse(self, now_s: float) -> None:
        if now_s < self._next_pulse_s:
            return
        self._next_pulse_s = now_s + PULSE_S
        fronts = feel_pulse(self._socket, PULSE_S)
        now_s = time.monotonic()
        if self._forgive(now_s):
            # The time to answer ran out while nobody could.
            return
        if self.brain.watch is not None:
            self.brain.watch.observe(now_s, is_registered=fronts is not None)
        for number, front in enumerate(self.fronts):
            if front.watch is not None and fronts is None:
                front.watch.observe_outage(now_s)
            elif front.watch is not None and fronts is not None:
                front.watch.observe(now_s, is_registered=number in fronts)

    def _forgive(self, now_s: float) -> bool:
        """Forgets all silence of children if this process stood still itself; says if it did."""
        stood_still = self._own_pause.look(now_s)
        for child in self._children():
            if stood_still and child.watch is not None:
                child.watch.observe_outage(now_s)
        return stood_still

    def _drain(self) -> None:
        for front in self.fronts:
            front.terminate()
        num_told = 1
        limit_s = time.monotonic() + self._config.drain_timeout_s + _OVERSTAY_S
        while any(front.poll() is None for front in self.fronts):
            now_s = time.monotonic()
            if self.num_signals > num_told:
                num_told = self.num_signals
                limit_s = min(limit_s, now_s + _OVERSTAY_S)
                for front in self.fronts:
                    front.terminate()
            if now_s > limit_s:
                self._report("fronts overstay their drain: killing them")
                return
            if self.brain.poll() is not None:
                self.brain.revive(now_s)
            time.sleep(POLL_S)

    def _children(self) -> tuple[Replica, ...]:
        return (self.brain, *self.fronts)

    def _take_line(self, line: str) -> None:
        ready = _READY.match(line)
        if ready is not None and not self.is_ready:
            self._ready[ready[1]] = ready[2]
        elif self.is_ready or _REFUSAL.match(line) is None:
            # What ends the start is told once, as its error, and not by every child.
            self._report(line)


def run_group(config: RouterConfig) -> int:
    """Runs a router of several fronts; returns the exit status (0 drained, 2 bad settings)."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pdserve-router-"))
        try:
            ports = _hold_ports(config, stack)
            group = RouterGroup(
                config,
                folder=Path(folder),
                ports=ports,
                report=lambda line: write_line(sys.stderr, line),
            )

            def on_signal(number: int, frame: FrameType | None) -> None:
                group.num_signals += 1

            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, on_signal)
            group.run()
        except ConfigError as error:
            write_line(sys.stderr, f"error: {tell_by_flags(error, RouterConfig)}")
            return EXIT_CONFIG
        except InternalError as error:
            write_line(sys.stderr, f"error: {error}")
            return 1
    return 0


def _hold_ports(config: RouterConfig, stack: ExitStack) -> Ports:
    """Finds the ports that are to be free ones, and keeps others off those that are shared."""

    def hold(port: int, setting: str) -> int:
        holder = stack.enter_context(bind_shared_port(config.host, port, setting))
        return int(holder.getsockname()[1])

    def hold_free() -> int:
        return stack.enter_context(closing(HeldPort(config.host))).number

    return Ports(
        grpc=hold(config.port, "port"),
        http=config.http_port if config.no_http else hold(config.http_port, "http_port"),
        metrics=config.metrics_port or hold_free(),
    )
