"""Random requests through both pools' engines: handed off or not, in samples, cancelled, preempted.

A request comes at its turn; the router's part is played by `PairRouter`.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pdserve.request import Request, SamplingParams
from tests.support.cuda_pair import run_colocated
from tests.support.engine_pair import EnginePair
from tests.support.engine_requests import make_request
from tests.support.pair_router import PairRouter

SAMPLING = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.9),
    SamplingParams(temperature=1.0, min_p=0.05, min_tokens=3),
    SamplingParams(temperature=0.9, frequency_penalty=0.5),
    SamplingParams(temperature=0.9, n=3),
)


@dataclass(frozen=True, kw_only=True)
class Visit:
    """A request, and what happens to it; times in turns of the engines."""

    request: Request
    turn: int
    is_local: bool
    """The decode engine computes its prompt."""
    cancelled_at: int | None


def make_visits(
    seed: int, count: int, vocab_size: int, *, max_prompt: int, max_tokens: int, turns: int
) -> list[Visit]:
    """Draws requests; half of them begin with one of two common stems."""
    numbers = random.Random(seed)
    stems = [[numbers.randrange(3, vocab_size) for _ in range(max_prompt // 2)] for _ in range(2)]
    visits = []
    for index in range(count):
        stem = numbers.choice((stems[0], stems[1], [], []))
        length = numbers.randint(len(stem) + 1, max_prompt)
        tail = [numbers.randrange(3, vocab_size) for _ in range(length - len(stem))]
        sampling = replace(
            SAMPLING[index % len(SAMPLING)],
            max_tokens=numbers.randint(1, max_tokens),
            seed=index,
            # The log-probability of NaN shows, where a token would look like any other.
            logprobs=0,
            ignore_eos=True,
        )
        turn = numbers.randrange(turns)
        is_cancelled = numbers.random() < 0.2
        visits.append(
            Visit(
                request=make_request(f"s{seed}r{index}", (*stem, *tail), sampling=sampling),
                turn=turn,
                is_local=numbers.random() < 0.4,
                cancelled_at=turn + numbers.randrange(1, turns) if is_cancelled else None,
            )
        )
    return visits


def visit(pair: EnginePair, visits: Sequence[Visit], *, max_turns: int = 20_000) -> PairRouter:
    """Plays all visits to their end; checks ledgers, and that no log-probability is NaN."""
    router = PairRouter(pair)
    last = max(max(one.turn, one.cancelled_at or 0) for one in visits)
    for turn in range(max_turns):
        for one in visits:
            if one.turn == turn:
                router.adopt(one.request)
                pair.submit(one.request, is_local=one.is_local)
            if one.cancelled_at == turn:
                cancel(pair, router, one.request)
        pair.turn()
        router.read()
        if turn > last and not router.open:
            break
    else:
        raise AssertionError(f"still open after {max_turns} turns: {sorted(router.open)}")
    for _ in range(200):  # what a cancelled hand-off held comes back with its lease
        pair.turn()
    pair.assert_ledger()
    for name, logprobs in router.logprobs.items():
        assert all(math.isfinite(one.logprob) for one in logprobs.values()), name
        assert len(logprobs) >= len(router.outputs[name]), name
    return router


def cancel(pair: EnginePair, router: PairRouter, request: Request) -> None:
    """Cancels what is still open of a request, wherever it is."""
    for one in request.samples():
        current = router.open.pop(one.request_id, None)
        if current is not None:
            for engine in (pair.prefill, pair.decode):
                pair.cancel(engine, current)


def expect_alone(pair: EnginePair, visits: Sequence[Visit]) -> dict[str, list[int]]:
    """Returns the tokens of every request, one after another through one engine."""
    outputs: dict[str, list[int]] = {}
    for one in visits:
        outputs |= run_colocated(pair, [one.request])
    return outputs


def compare(router: PairRouter, visits: Sequence[Visit], expected: dict[str, list[int]]) -> int:
    """Checks tokens, those told before a cancel included; returns how many requests had ended."""
    num_ended = 0
    for one in visits:
        for sample in one.request.samples():
            made, known = router.outputs[sample.request_id], expected[sample.request_id]
            if one.cancelled_at is None:
                assert made == known, sample.request_id
            else:
                assert made == known[: len(made)], sample.request_id
            num_ended += len(made) == len(known)
    return num_ended
