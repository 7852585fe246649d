"""Random requests through a decode scheduler: submitted, cancelled, let go and sent again."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from decode_worker.scheduler import DecodeScheduler
from pdserve.config.engine import EngineConfig
from pdserve.engine.batch import StepRunner, lookahead_of
from pdserve.engine.pipeline import StepPipeline
from pdserve.request import Request, RequestId, SamplingParams
from pdserve.timeline import MonotonicClock


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A request, when it comes, and when it is cancelled; turns of the engine."""

    request: Request
    turn: int
    cancelled_at: int | None


def make_arrivals(
    seed: int,
    count: int,
    vocab_size: int,
    *,
    max_prompt: int,
    max_tokens: int,
    params: Sequence[SamplingParams],
    cancel_rate: float = 0.2,
    turns: int = 20,
) -> list[Arrival]:
    numbers = random.Random(seed)
    stem = [numbers.randrange(3, vocab_size) for _ in range(max_prompt)]
    arrivals = []
    for index in range(count):
        shared = numbers.choice((0, 0, max_prompt // 2))
        length = numbers.randint(shared + 1, max_prompt)
        tail = [numbers.randrange(3, vocab_size) for _ in range(length - shared)]
        prompt = tuple(stem[:shared] + tail)
        turn = numbers.randrange(turns)
        is_cancelled = numbers.random() < cancel_rate
        arrivals.append(
            Arrival(
                request=Request(
                    request_id=RequestId(f"r{index}"),
                    token_ids=prompt,
                    num_prompt_tokens=len(prompt),
                    sampling=replace(
                        params[index % len(params)],
                        max_tokens=numbers.randint(1, max_tokens),
                        seed=index,
                    ),
                    eos_token_ids=(2,),
                ),
                turn=turn,
                cancelled_at=turn + numbers.randrange(1, turns) if is_cancelled else None,
            )
        )
    return arrivals


def play(
    engine: EngineConfig, num_blocks: int, runner: StepRunner, arrivals: Sequence[Arrival]
) -> dict[RequestId, list[int]]:
    """Runs all requests to their end; returns the tokens of those that were not cancelled."""
    scheduler = DecodeScheduler(
        engine,
        num_blocks,
        "test",
        MonotonicClock(),
        max_waiting=len(arrivals) + 8,
        max_local_prefill_tokens=None,
        lookahead=lookahead_of(runner, engine.pipeline_parallel),
    )
    tokens: dict[RequestId, list[int]] = {one.request.request_id: [] for one in arrivals}
    cancelled: set[RequestId] = set()
    pipeline = StepPipeline(runner, scheduler.plan_step)
    turn = 0
    last = max(one.turn for one in arrivals)
    while turn <= last or scheduler.has_work or not pipeline.is_empty:
        for one in arrivals:
            if one.turn == turn:
                scheduler.submit_local(one.request)
            if one.cancelled_at == turn:
                cancelled.add(one.request.request_id)
                scheduler.cancel(one.request.request_id)
        ended = pipeline.turn()
        if ended is not None:
            for progress in scheduler.complete_step(ended.plan, ended.result):
                assert progress.request_id not in cancelled
                assert progress.output_index == len(tokens[progress.request_id])
                tokens[progress.request_id].append(progress.token.token_id)
        for gone in scheduler.take_let_go():
            request = gone.request
            known = tokens[request.request_id][request.num_emitted :]
            scheduler.submit_local(
                replace(
                    request,
                    token_ids=(*request.token_ids, *known),
                    attempt=request.attempt + 1,
                    is_priority=True,
                )
            )
        scheduler.check()
        turn += 1
    ledger = scheduler.ledger()
    assert ledger.sequences == 0
    assert ledger.free_blocks + ledger.cached_blocks == num_blocks
    return {name: made for name, made in tokens.items() if name not in cancelled}
