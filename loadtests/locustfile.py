"""Users of the gRPC API for locust: `locust --config loadtests/headless.conf --scenario chat`.

One process, or many: `locust --master --scenario chat` and `locust --worker` elsewhere.
"""

from grpc.experimental import gevent as grpc_gevent

# Before locust, which replaces what blocks by what yields to other users; without it the first
# stream of a process would hold all others.
grpc_gevent.init_gevent()

import argparse  # noqa: E402
import json  # noqa: E402
import logging  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402
from random import Random  # noqa: E402

import gevent  # noqa: E402
from gevent.pool import Pool  # noqa: E402
from locust import User, constant, events, task  # noqa: E402
from locust.env import Environment  # noqa: E402
from locust.exception import StopUser  # noqa: E402
from locust.runners import MasterRunner, WorkerRunner  # noqa: E402

from launcher.client import bearer, open_sync_channel  # noqa: E402
from loadtests.client import LoadClient  # noqa: E402
from loadtests.meter import GENERATE, GOODPUT, ITL, TTFT, Event, Objectives  # noqa: E402
from loadtests.sessions import SESSIONS, Ask, Sizes  # noqa: E402
from loadtests.thresholds import RunFigures, Thresholds, missed  # noqa: E402
from loadtests.traces import fit_prompt  # noqa: E402
from pdserve.errors import PdserveError  # noqa: E402
from pdserve.rpc.v1 import inference_pb2, inference_pb2_grpc  # noqa: E402
from simulation.traces import read_trace  # noqa: E402

logger = logging.getLogger("loadtests")

_REQUEST_TYPE = "grpc"
_INFO_TIMEOUT_S = 30.0
_TRACE = "trace"
_MAX_OPEN_OF_TRACE = 4096


@events.init_command_line_parser.add_listener
def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds what pdserve's load needs to the options of locust."""
    add = parser.add_argument
    add("--scenario", default="chat", choices=[*SESSIONS, _TRACE])
    add("--api-key", default="", env_var="PDSERVE_LOAD_API_KEY", is_secret=True)
    add("--max-prompt-tokens", type=int, default=0, help="0: as the model allows")
    add("--output-tokens", type=int, default=64)
    add("--load-seed", type=int, default=0)
    add("--trace", default="", help="file of Mooncake's or Azure's format, for --scenario trace")
    add("--trace-scale", type=float, default=1.0, help="of lengths, for small models")
    add("--trace-speed", type=float, default=1.0, help="2 sends twice as fast as it was")
    add("--slo-ttft-ms", type=float, default=1000.0)
    add("--slo-tpot-ms", type=float, default=100.0)
    add("--min-requests", type=int, default=1)
    add("--max-failure-share", type=float, default=0.0)
    add("--min-good-share", type=float, default=None)
    add("--max-ttft-p99-ms", type=float, default=None)
    add("--max-itl-p99-ms", type=float, default=None)


class InferenceUser(User):
    """Speaks with one router over a connection of its own."""

    abstract = True

    def __init__(self, environment: Environment) -> None:
        """Asks the router what it serves."""
        super().__init__(environment)
        options = environment.parsed_options
        address = (self.host or "").removeprefix("grpc://")
        api_key = options.api_key or None
        self._channel = open_sync_channel(address)
        stub = inference_pb2_grpc.InferenceStub(self._channel)
        info = stub.GetModelInfo(
            inference_pb2.GetModelInfoRequest(),
            timeout=_INFO_TIMEOUT_S,
            metadata=bearer(api_key),
            wait_for_ready=True,
        )
        room = info.max_model_len - options.output_tokens
        self.sizes = Sizes(
            vocab_size=info.vocab_size,
            max_prompt_tokens=min(options.max_prompt_tokens or room, room),
            output_tokens=options.output_tokens,
        )
        self.load = LoadClient(
            stub.Generate,
            fire=self._fire,
            objectives=Objectives(
                ttft_s=options.slo_ttft_ms / 1000.0, tpot_s=options.slo_tpot_ms / 1000.0
            ),
            api_key=api_key,
        )

    def _fire(self, event: Event, error: PdserveError | None) -> None:
        self.environment.events.request.fire(
            request_type=_REQUEST_TYPE,
            name=event.name,
            response_time=event.seconds * 1000.0,
            response_length=event.num_tokens,
            exception=error,
            context={},
        )

    def on_stop(self) -> None:
        """Hangs up."""
        self._channel.close()


class SessionUser(InferenceUser):
    """Behaves as its scenario says: waits for an answer before it asks again."""

    wait_time = constant(0)
    _num_users = 0

    def __init__(self, environment: Environment) -> None:
        """Draws its own numbers: equal seeds and equal users ask the same."""
        super().__init__(environment)
        options = environment.parsed_options
        index = SessionUser._num_users
        SessionUser._num_users += 1
        self._rng = Random(f"{options.load_seed} {_worker_index(environment)} {index}")
        self._session = SESSIONS[options.scenario](self._rng, self.sizes)

    @task
    def ask(self) -> None:
        """Thinks, asks, and takes the answer."""
        ask = self._session.next_ask()
        gevent.sleep(ask.wait_s)
        self._session.take_answer(self.load.ask(ask, seed=self._rng.getrandbits(32)))


class TraceUser(InferenceUser):
    """Sends each request of a trace when it is due, whatever became of those before.

    One a process; of several processes each takes every n-th request.
    """

    fixed_count = 1
    wait_time = constant(0)

    @task
    def replay(self) -> None:
        """Runs to the end of the trace, or of the test."""
        options = self.environment.parsed_options
        index, count = _worker_index(self.environment), _num_workers(self.environment)
        start_s = time.perf_counter()
        pool = Pool(_MAX_OPEN_OF_TRACE)
        try:
            for number, request in enumerate(read_trace(Path(options.trace)).arrivals):
                if number % count != index:
                    continue
                prompt_ids = fit_prompt(request, self.sizes, options.trace_scale)
                wanted = max(1, round(request.num_output_tokens * options.trace_scale))
                ask = Ask(
                    wait_s=0.0,
                    prompt_ids=prompt_ids,
                    max_tokens=min(wanted, options.output_tokens),
                )
                due_s = start_s + request.at_s / options.trace_speed
                gevent.sleep(max(0.0, due_s - time.perf_counter()))
                pool.spawn(self.load.ask, ask, seed=number)
        finally:
            # Those under way count as well; locust's --stop-timeout bounds the wait.
            pool.join()
        raise StopUser


@events.init.add_listener
def choose_user(environment: Environment, **_: object) -> None:
    """Leaves locust the one class that the scenario needs."""
    options = environment.parsed_options
    is_trace = options.scenario == _TRACE
    if is_trace and not Path(options.trace).is_file():
        raise SystemExit(f"--scenario trace needs --trace FILE, got {options.trace!r}")
    environment.user_classes = [TraceUser if is_trace else SessionUser]


@events.quitting.add_listener
def judge(environment: Environment, **_: object) -> None:
    """Writes the figures as a line of JSON, and fails the run if a threshold was missed."""
    if isinstance(environment.runner, WorkerRunner):
        return
    options = environment.parsed_options
    figures = figures_of(environment)
    lines = missed(
        figures,
        Thresholds(
            min_requests=options.min_requests,
            max_failure_share=options.max_failure_share,
            min_good_share=options.min_good_share,
            max_ttft_p99_ms=options.max_ttft_p99_ms,
            max_itl_p99_ms=options.max_itl_p99_ms,
        ),
    )
    print(json.dumps(summary_of(environment, figures)), flush=True)  # noqa: T201
    for line in lines:
        logger.error("missed: %s", line)
    environment.process_exit_code = 1 if lines else 0


def figures_of(environment: Environment) -> RunFigures:
    """Reads what thresholds ask for from the statistics of locust."""
    stats = environment.stats
    whole = stats.get(GENERATE, _REQUEST_TYPE)
    return RunFigures(
        num_requests=whole.num_requests,
        num_failures=whole.num_failures,
        num_good=stats.get(GOODPUT, _REQUEST_TYPE).num_requests,
        ttft_p99_ms=float(stats.get(TTFT, _REQUEST_TYPE).get_response_time_percentile(0.99)),
        itl_p99_ms=float(stats.get(ITL, _REQUEST_TYPE).get_response_time_percentile(0.99)),
    )


def summary_of(environment: Environment, figures: RunFigures) -> dict[str, float | int | str]:
    """Returns what a run is compared by."""
    stats = environment.stats
    ttft, itl = (stats.get(name, _REQUEST_TYPE) for name in (TTFT, ITL))
    good = stats.get(GOODPUT, _REQUEST_TYPE)
    return {
        "scenario": environment.parsed_options.scenario,
        "requests": figures.num_requests,
        "failures": figures.num_failures,
        "good": figures.num_good,
        "goodput_per_s": round(good.total_rps, 3),
        "ttft_p50_ms": round(float(ttft.get_response_time_percentile(0.5)), 1),
        "ttft_p99_ms": round(figures.ttft_p99_ms, 1),
        "itl_p50_ms": round(float(itl.get_response_time_percentile(0.5)), 1),
        "itl_p99_ms": round(figures.itl_p99_ms, 1),
    }


def _worker_index(environment: Environment) -> int:
    runner = environment.runner
    return max(0, runner.worker_index) if isinstance(runner, WorkerRunner) else 0


def _num_workers(environment: Environment) -> int:
    count = environment.parsed_options.expect_workers
    runner = environment.runner
    assert not isinstance(runner, MasterRunner), "a master has no users"
    return max(1, count) if isinstance(runner, WorkerRunner) else 1
