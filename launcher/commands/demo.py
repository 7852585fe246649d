"""`pdserve demo`: a real model on two pools, a killed worker, and the same tokens as without it."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

import grpc
import typer
from rich.console import Console

from launcher.client import Generation, generate_stream, get_loads, open_sync_channel
from launcher.demo_script import KILL_DRILL, MODEL, ROUNDS, ChatTurn, DemoPrompt
from launcher.demo_view import StreamPrinter, timeline_table
from launcher.local_pool import LocalCluster
from launcher.options.life import default_log_level
from pdserve.config.cluster import ClusterConfig
from pdserve.config.engine import EngineConfig
from pdserve.config.log_level import LogLevel
from pdserve.errors import InternalError
from pdserve.process import is_running
from pdserve.request import Role

_REQUEST_TIMEOUT_S = 60.0
_FIND_TIMEOUT_S = 5.0
_TOKENS_BEFORE_KILL = 6


def demo(
    model: Annotated[
        str, typer.Option(help="An alias, a .gguf file or a model folder with a chat template.")
    ] = MODEL,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show the workers' logs.")] = False,
    log_level: Annotated[
        LogLevel | None,
        typer.Option(help="Of the children; by default info with --verbose, else as of serve."),
    ] = None,
) -> int:
    """Show a whole cluster at work on this machine, and what a kill -9 does to a stream."""
    console = Console(highlight=False, soft_wrap=True)
    log = Log(console, is_verbose=verbose)
    config = ClusterConfig(
        engine=EngineConfig(
            model=model,
            dtype="float32",
            max_model_len=2048,
            # Enough for the demo; touching half a gigabyte four times takes seconds.
            kv_cache_memory_bytes=128 << 20,
        ),
        num_prefill=2,
        num_decode=2,
        port=0,
        no_http=True,
        drain_timeout_s=10.0,
        log_level=log_level or ("info" if verbose else default_log_level()),
    )
    console.print("pdserve demo: a router, 2 prefill and 2 decode workers on this machine, float32")
    cluster = LocalCluster(config, report=log.write)
    started_s = time.monotonic()
    pids: set[int] = set()
    try:
        cluster.start()
        pids.update(cluster.pids())
        with open_sync_channel(cluster.address) as channel:
            show = Show(cluster, channel, console)
            show.play_rounds()
            show.play_kill()
        pids.update(cluster.pids())
    except BaseException:
        log.show_tail()
        raise
    finally:
        cluster.stop()
    left = sorted(pid for pid in pids if is_running(pid))
    if left:
        raise InternalError(f"processes are left behind: {left}")
    console.print(
        f"stopped; none of {len(pids)} processes is left; "
        f"{time.monotonic() - started_s:.1f} s in all"
    )
    return 0


class Log:
    """Shows the launcher's phase lines; keeps the children's for the case of a failure."""

    def __init__(self, console: Console, *, is_verbose: bool) -> None:
        self._console = console
        self._is_verbose = is_verbose
        self._tail: deque[str] = deque(maxlen=40)

    def write(self, line: str) -> None:
        """Takes one line, from any thread."""
        is_of_child = line.startswith("[")
        if is_of_child:
            self._tail.append(line)
        if self._is_verbose or not is_of_child:
            self._console.print(f"  {line}", markup=False, style="dim")

    def show_tail(self) -> None:
        """Prints the last lines of all children."""
        if not self._is_verbose:
            for line in list(self._tail):
                self._console.print(line, markup=False)


class Show:
    """The scenes of the demo, played against a running cluster."""

    def __init__(self, cluster: LocalCluster, channel: grpc.Channel, console: Console) -> None:
        self._cluster = cluster
        self._channel = channel
        self._console = console
        self._printer = StreamPrinter(lambda line: console.print(line, markup=False))
        self._answers: dict[str, str] = {}

    def play_rounds(self) -> None:
        """Streams the rounds of concurrent requests, then shows where their time went.

        Raises:
            InternalError: no KV was handed off at all.
        """
        results: list[tuple[str, Generation]] = []
        for number, prompts in enumerate(ROUNDS, start=1):
            self._console.print(f"\nround {number}: {len(prompts)} requests at once")
            results += zip(
                [prompt.label for prompt in prompts], self._run_all(prompts), strict=True
            )
        self._console.print()
        self._console.print(timeline_table(results))
        timelines = [g.timeline for _, g in results if g.timeline is not None]
        recomputed = sum(timeline.recomputed_tokens for timeline in timelines)
        self._console.print(f"prompt tokens computed again on decode workers: {recomputed}")
        if not any(timeline.kv_blocks_shipped for timeline in timelines):
            raise InternalError("no KV block went from prefill to decode")

    def play_kill(self) -> None:
        """Runs one sampled request twice, the second time with its decode worker killed.

        Raises:
            InternalError: the outputs differ, or the kill hit nothing.
        """
        self._console.print("\none sampled request, undisturbed")
        expected = self._run(KILL_DRILL)
        self._find_busy_decode_workers(is_enough=lambda busy: not busy)
        self._console.print("the same request; its decode worker is killed (-9) in mid-stream")
        with ThreadPoolExecutor(1) as pool:
            counter: list[str] = []
            future = pool.submit(self._run, KILL_DRILL, counter)
            while len(counter) < _TOKENS_BEFORE_KILL and not future.done():
                time.sleep(0.005)
            victim = self._find_busy_decode_workers(is_enough=bool)[0]
            self._cluster.kill(victim)
            self._console.print(f"  killed {victim} after {len(counter)} pieces of text")
            found = future.result()
        if found.timeline is None or found.timeline.attempts < 2:
            raise InternalError(f"{victim} was killed too late to disturb the request")
        if found.token_ids != expected.token_ids or found.text != expected.text:
            raise InternalError(
                f"the outputs differ: {expected.token_ids} undisturbed, {found.token_ids} with a "
                f"kill of {victim}"
            )
        self._console.print(
            f"same {len(found.token_ids)} tokens, id for id, in {found.timeline.attempts} attempts "
            f"(finished on {found.timeline.decode_worker}; longest gap "
            f"{found.timeline.max_gap_s * 1000:.0f} ms)\n"
        )

    def _run_all(self, prompts: Sequence[DemoPrompt]) -> list[Generation]:
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(self._run, prompts))

    def _run(self, prompt: DemoPrompt, counter: list[str] | None = None) -> Generation:
        def on_text(text: str) -> None:
            self._printer.add(prompt.label, text)
            if counter is not None:
                counter.append(text)

        request = prompt.to_request([self._to_turn(turn) for turn in prompt.history])
        try:
            generation = generate_stream(
                self._channel, request, timeout_s=_REQUEST_TIMEOUT_S, on_text=on_text
            )
        finally:
            self._printer.end(prompt.label)
        self._answers[prompt.label] = generation.text
        return generation

    def _to_turn(self, turn: ChatTurn) -> ChatTurn:
        if turn.answer_of is None:
            return turn
        return ChatTurn(role=turn.role, content=self._answers[turn.answer_of])

    def _find_busy_decode_workers(self, is_enough: Callable[[list[str]], bool]) -> list[str]:
        """Asks who runs something until the answer will do; load figures are a heartbeat old."""
        deadline_s = time.monotonic() + _FIND_TIMEOUT_S
        busy: list[str] = []
        while time.monotonic() < deadline_s:
            busy = [
                worker.worker_id
                for worker in get_loads(self._channel)
                if worker.role == Role.DECODE.value and worker.load.num_running > 0
            ]
            if is_enough(busy):
                return busy
            time.sleep(0.01)
        raise InternalError(f"busy decode workers: {busy}")
