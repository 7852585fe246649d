"""Runs requests through the real schedulers and the engine's pipeline, without the processes."""

import random
import statistics
import time
from dataclasses import dataclass, replace
from itertools import pairwise

from decode_worker.scheduler import DecodeScheduler
from pdserve.config.engine import EngineConfig
from pdserve.engine.batch import StepRunner, lookahead_of
from pdserve.engine.pipeline import StepPipeline
from pdserve.request import Request, RequestId, SamplingParams
from pdserve.timeline import MonotonicClock
from prefill_worker.scheduler import PrefillScheduler


@dataclass(frozen=True, kw_only=True, slots=True)
class Stand:
    """An engine under test."""

    runner: StepRunner
    engine: EngineConfig
    num_blocks: int
    vocab_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeTimes:
    """How long steps of decoding took."""

    mean_ms: float
    """Time per output token: all steps but the first, over their number."""
    median_ms: float
    max_ms: float
    host_ms: float
    """To book a step's tokens."""


def make_request(
    name: str, prompt: tuple[int, ...], max_tokens: int, sampling: SamplingParams | None = None
) -> Request:
    """Makes a greedy request that no token ends."""
    params = SamplingParams(temperature=0.0) if sampling is None else sampling
    return Request(
        request_id=RequestId(name),
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        sampling=replace(params, max_tokens=max_tokens, ignore_eos=True),
    )


def make_prompt(numbers: random.Random, length: int, vocab_size: int) -> tuple[int, ...]:
    """Draws token ids."""
    return tuple(numbers.randrange(vocab_size) for _ in range(length))


def time_decode(
    stand: Stand,
    batch: int,
    prompt: int,
    num_tokens: int,
    sampling: SamplingParams | None = None,
    warm_steps: int = 4,
) -> DecodeTimes:
    """Decodes a batch whose KV came over a hand-off, as on a decode worker.

    Args:
        stand: the engine.
        batch: sequences.
        prompt: tokens of each.
        num_tokens: to make of each.
        sampling: how; None is greedy.
        warm_steps: first steps that are left out.
    """
    numbers = random.Random(f"{batch} {prompt}")
    scheduler = DecodeScheduler(
        replace(stand.engine, enable_prefix_caching=False),
        stand.num_blocks,
        "bench",
        MonotonicClock(),
        max_waiting=batch,
        max_local_prefill_tokens=None,
        lookahead=lookahead_of(stand.runner, stand.engine.pipeline_parallel),
    )
    for index in range(batch):
        request = make_request(
            f"r{index}",
            make_prompt(numbers, prompt, stand.vocab_size),
            num_tokens + warm_steps + 1,
            sampling,
        )
        scheduler.reserve(request)
        scheduler.start(request.request_id, 1, {0: numbers.randrange(stand.vocab_size)})
    pipeline = StepPipeline(stand.runner, scheduler.plan_step)
    ends: list[float] = []
    host_s: list[float] = []
    while True:
        ended = pipeline.turn()
        if ended is None:
            break
        ends.append(time.perf_counter())
        made = scheduler.complete_step(ended.plan, ended.result)
        assert len(made) == batch
        host_s.append(time.perf_counter() - ends[-1])
    gaps = [later - earlier for earlier, later in pairwise(ends[warm_steps:])]
    return DecodeTimes(
        mean_ms=1000 * (ends[-1] - ends[warm_steps]) / len(gaps),
        median_ms=1000 * statistics.median(gaps),
        max_ms=1000 * max(gaps),
        host_ms=1000 * statistics.median(host_s),
    )


def time_prefill(stand: Stand, batch: int, prompt: int, cached: int = 0, runs: int = 5) -> float:
    """Returns the median milliseconds from submission to the last prompt's token."""
    return statistics.median(list_prefill_ms(stand, batch, prompt, cached, runs))


def list_prefill_ms(
    stand: Stand, batch: int, prompt: int, cached: int = 0, runs: int = 5
) -> list[float]:
    """Returns the milliseconds from submission to the last prompt's token, of each run.

    Args:
        stand: the engine.
        batch: prompts, submitted at once.
        prompt: new tokens of each.
        cached: tokens before them that the prefix cache holds.
        runs: times it is done.
    """
    numbers = random.Random(f"{batch} {prompt} {cached}")
    scheduler = PrefillScheduler(
        replace(stand.engine, enable_prefix_caching=cached > 0),
        stand.num_blocks,
        "bench",
        MonotonicClock(),
        max_waiting=batch,
        look_ahead=4,
        num_stages=stand.engine.pipeline_parallel,
    )
    shared = make_prompt(numbers, cached, stand.vocab_size)
    pipeline = StepPipeline(stand.runner, scheduler.plan_step)
    times: list[float] = []
    for run in range(runs + 1 + bool(cached)):
        requests = [
            make_request(
                f"{run}-{index}", shared + make_prompt(numbers, prompt, stand.vocab_size), 2
            )
            for index in range(batch)
        ]
        begin_s = time.perf_counter()
        for request in requests:
            scheduler.submit(request)
        while (ended := pipeline.turn()) is not None:
            for progress in scheduler.complete_step(ended.plan, ended.result):
                if progress.samples:
                    scheduler.release(progress.request_id, 1)
        times.append(time.perf_counter() - begin_s)
        assert not scheduler.has_work
    # The first run fills the cache; the one behind it, or it, compiles.
    return [1000 * one for one in times[1 + bool(cached) :]]
