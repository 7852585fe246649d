"""`pdserve demo-autoscale`: a load comes and goes, and both pools grow and shrink with it."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Annotated

import grpc
import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from autoscaler.figures import Numbers
from autoscaler.settings import PoolRange, ScalingSettings
from launcher.client import generate_stream, open_sync_channel
from launcher.commands.demo import Log
from launcher.demo_script import MODEL
from launcher.local_pool import LocalCluster
from launcher.options.life import default_log_level
from launcher.scaled_cluster import autoscale_launched
from pdserve.config.cluster import ClusterConfig
from pdserve.config.engine import EngineConfig, LoadFormat
from pdserve.errors import InternalError, PdserveError
from pdserve.rpc.v1 import inference_pb2, types_pb2

_CALM_S = 5.0
_GROW_S = 30.0
"""Clients come for so long, or until both pools have grown."""
_SHRINK_S = 35.0
"""Then nobody asks for so long, or until both pools have shrunk."""
_NUM_CLIENTS = 12
_REQUEST_TIMEOUT_S = 120.0
_OUTPUT_TOKENS = 24
_SHOWN_DECISIONS = 8
_PROMPT = "The lighthouse keeper wrote in his book every evening what the sea had been like. "


def demo_autoscale(
    model: Annotated[str, typer.Option(help="An alias, a .gguf file or a model folder.")] = MODEL,
    load_format: Annotated[
        LoadFormat, typer.Option(help="dummy: random weights from config.json.")
    ] = "auto",
) -> int:
    """Show pools that grow under load and shrink after it, with a live table; about a minute."""
    console = Console(highlight=False, soft_wrap=True)
    log = Log(console, is_verbose=False)
    # Impatient: what takes minutes in service is to be seen in seconds.
    settings = ScalingSettings(
        prefill=PoolRange(least=1, most=2),
        decode=PoolRange(least=1, most=2),
        ttft_s=1.0,
        tpot_s=0.06,
        rate_window_s=5.0,
        settle_s=8.0,
        burst_memory_s=10.0,
        confirm_s=2.0,
        shrink_pause_s=2.0,
        catch_up_s=5.0,
        idle_s=10.0,
        start_s=8.0,
        queue_tokens=256,
    )
    config = ClusterConfig(
        engine=EngineConfig(
            model=model,
            load_format=load_format,
            dtype="float32",
            max_model_len=512,
            kv_cache_memory_bytes=64 << 20,
            max_num_seqs=8,
        ),
        port=0,
        no_http=True,
        drain_timeout_s=20.0,
        log_level=default_log_level(),
    )
    console.print("pdserve demo-autoscale: pools of 1..2 replicas each on this machine")
    cluster = LocalCluster(config, report=log.write)
    view = View()
    try:
        cluster.start()
        with (
            autoscale_launched(
                cluster, config, settings, report=view.note_decision, control_folder=None
            ) as scaled,
            Load(cluster.address) as load,
            Live(console=console, refresh_per_second=4, transient=False) as live,
        ):

            def play(num_clients: int, seconds: float, is_done: Callable[[], bool]) -> None:
                load.num_clients = num_clients
                until_s = time.monotonic() + seconds
                while time.monotonic() < until_s and not is_done():
                    live.update(view.draw(scaled.controller.numbers, load))
                    time.sleep(0.25)

            play(1, _CALM_S, lambda: False)
            play(_NUM_CLIENTS, _GROW_S, lambda: has_sizes(cluster, 2))
            play(0, _SHRINK_S, lambda: has_sizes(cluster, 1))
    except BaseException:
        log.show_tail()
        raise
    finally:
        cluster.stop()
    console.print(
        f"{load.num_done} requests served, {load.num_failed} failed; "
        f"{view.num_grown} decisions to grow, {view.num_shrunk} to shrink"
    )
    if load.num_failed:
        raise InternalError(f"{load.num_failed} requests failed: {load.last_error}")
    if not view.num_grown or not view.num_shrunk:
        raise InternalError("the pools did not grow and shrink")
    return 0


def has_sizes(cluster: LocalCluster, count: int) -> bool:
    """Says whether both pools have so many replicas that serve, and none that leaves."""
    members = cluster.members()
    return len(members) == 2 * count and all(
        one.record is not None and not one.is_draining for one in members
    )


class Load:
    """Clients in threads, each with one request after another."""

    def __init__(self, address: str) -> None:
        self.num_clients = 0
        self.num_done = 0
        self.num_failed = 0
        self.last_error = ""
        self._stopped = threading.Event()
        self._channel = open_sync_channel(address)
        self._threads = ThreadPoolExecutor(_NUM_CLIENTS)
        self._lock = threading.Lock()

    def __enter__(self) -> "Load":
        for number in range(_NUM_CLIENTS):
            self._threads.submit(self._ask_on, number, self._channel)
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._threads.shutdown()
        self._channel.close()

    def _ask_on(self, number: int, channel: grpc.Channel) -> None:
        turn = 0
        while not self._stopped.wait(0.05):
            if number >= self.num_clients:
                continue
            turn += 1
            request = inference_pb2.GenerateRequest(
                text=f"{number}.{turn} " + _PROMPT * 8,
                sampling=types_pb2.SamplingParams(
                    max_tokens=_OUTPUT_TOKENS, temperature=0.0, ignore_eos=True
                ),
            )
            try:
                generate_stream(channel, request, timeout_s=_REQUEST_TIMEOUT_S)
            except PdserveError as error:
                with self._lock:
                    self.num_failed += 1
                    self.last_error = str(error)
            else:
                with self._lock:
                    self.num_done += 1


@dataclass
class View:
    """The live table, and the decisions below it."""

    num_grown: int = 0
    num_shrunk: int = 0
    lines: list[str] = field(default_factory=list)
    started_s: float = field(default_factory=time.monotonic)

    def note_decision(self, line: str) -> None:
        """Takes a decision in words, from the autoscaler's thread."""
        self.num_grown += ": grow " in line
        self.num_shrunk += ": shrink " in line
        self.lines.append(f"{time.monotonic() - self.started_s:5.0f} s  {line}")

    def draw(self, numbers: Numbers, load: Load) -> Group:
        """Returns the picture of now."""
        table = Table("pool", "replicas", "need", "waiting tokens", "oldest", "sequences", "KV")
        # Of no pool before the first figures have come.
        for role, pool in numbers.items():
            bar = "#" * pool.num_serving + "+" * pool.num_starting + "-" * pool.num_draining
            table.add_row(
                role,
                f"{bar:<6}",
                str(pool.need),
                str(pool.backlog_tokens),
                f"{max(pool.oldest_s, 0.0):.1f} s",
                str(pool.num_sequences),
                f"{pool.kv_share:.0%}",
            )
        title = Text(
            f"{load.num_clients} clients, {load.num_done} requests served, "
            f"{load.num_failed} failed   (# serves, + starts, - drains)"
        )
        recent = Text("\n".join(self.lines[-_SHOWN_DECISIONS:]), overflow="ellipsis")
        return Group(title, table, recent)
