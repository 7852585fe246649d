"""Many requests at once at both pools' engines: what others must not cost the last of them."""

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from pdserve.request import SamplingParams
from tests.support.engine_pair import EnginePair
from tests.support.engine_requests import make_request
from tests.support.pair_router import PairRouter
from tests.support.tiny_models import make_tiny_llama

CHUNK_TOKENS = 64
NUM_LONG = 10
LONG_TOKENS = 2000
NUM_AT_ONCE = 400
FRAMES_PER_TURN = 2
POOL_PACKAGES = ("kv_transfer", "prefill_worker", "decode_worker")
TraceFunction = Callable[[FrameType, str, Any], Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"))


def draw_prompt(numbers: random.Random, length: int) -> tuple[int, ...]:
    return tuple(numbers.randrange(3, 300) for _ in range(length))


def count_turns(pair: EnginePair, router: PairRouter, name: str) -> int:
    """Returns after how many turns a request has its first token."""
    for turn in range(1, 1000):
        pair.turn()
        router.read()
        if router.outputs[name]:
            return turn
    raise AssertionError(f"{name} never got its first token")


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_A5_a_short_prompt_waits_for_no_chunk_of_cancelled_long_ones(
    folder: Path, is_overlapped: bool
) -> None:
    """Ten prompts of 2,000 tokens (of 128k, at a chunk of 64), cancelled after some chunks.

    What is in flight on the device ends; beyond that, time is counted in chunks.
    """
    numbers = random.Random(2)
    short = make_request("short", draw_prompt(numbers, 20))
    options: dict[str, object] = {
        "prefill_blocks": 1400,
        "max_num_batched_tokens": CHUNK_TOKENS,
        "is_overlapped": is_overlapped,
    }
    idle = EnginePair(folder, **options)  # type: ignore[arg-type]
    calm = PairRouter(idle)
    calm.start(short)
    base_turns = count_turns(idle, calm, "short")

    pair = EnginePair(folder, **options)  # type: ignore[arg-type]
    long = [make_request(f"l{i}", draw_prompt(numbers, LONG_TOKENS)) for i in range(NUM_LONG)]
    for request in long:
        pair.submit(request)
    for _ in range(5):
        pair.turn()
    for request in long:
        pair.cancel(pair.prefill, request)
    num_computed = pair.prefill.describe().counters.prompt_tokens
    assert 0 < num_computed < LONG_TOKENS, "they were cancelled in the middle of the first one"
    router = PairRouter(pair)
    router.start(short)
    assert count_turns(pair, router, "short") <= base_turns + 1
    num_after = pair.prefill.describe().counters.prompt_tokens - num_computed
    assert num_after <= len(short.token_ids) + CHUNK_TOKENS
    while router.open:
        pair.turn()
        router.read()
    pair.settle()
    pair.assert_ledger()


class WorkCounter:
    """Counts lines that the pools' own code runs: work that no busy machine changes."""

    def __init__(self) -> None:
        self.num_lines = 0

    def __enter__(self) -> "WorkCounter":
        self._before = sys.gettrace()
        sys.settrace(self._enter_call)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._before)

    def _enter_call(self, frame: FrameType, event: str, arg: object) -> TraceFunction | None:
        module = frame.f_globals["__name__"].partition(".")[0]
        return self._count_line if module in POOL_PACKAGES else None

    def _count_line(self, frame: FrameType, event: str, arg: object) -> TraceFunction:
        self.num_lines += event == "line"
        return self._count_line


@dataclass
class HandoffLog:
    """Hand-offs in the order in which they ended: how long each took, and the work until then."""

    pair: EnginePair
    work: WorkCounter
    times_s: list[float] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)

    def note(self) -> None:
        """Reads what prefill has to tell its router, before the router does."""
        for update in self.pair.prefill_outbox.updates:
            if update.HasField("handed_off"):
                self.times_s.append(update.times.handoff_s)
                self.lines.append(self.work.num_lines)

    def quarter(self, number: int) -> tuple[float, int]:
        """Returns the time of a quarter's slowest hundredth, and what the quarter took in lines."""
        size = len(self.times_s) // 4
        first, last = number * size, number * size + size - 1
        slow_s = sorted(self.times_s[first : last + 1])[size * 99 // 100]
        return slow_s, self.lines[last] - self.lines[first]


def deliver_some(pair: EnginePair) -> None:
    """Lets a link that is slower than the prompts are computed take its share of a turn."""
    for _ in range(FRAMES_PER_TURN):
        if pair.links.has_next:
            sent, landed = pair.links.deliver()
            pair.prefill.handle(sent)
            pair.decode.handle(landed)
    pair.exchange()


@pytest.mark.parametrize(
    "decode_blocks",
    [pytest.param(1200, id="roomy"), pytest.param(40, id="tight", marks=pytest.mark.soak)],
)
def test_B8_the_last_of_400_hand_offs_cost_no_more_than_the_second_hundred(
    folder: Path, decode_blocks: int
) -> None:
    """Time is the pair's own clock, which counts turns; a slow link makes hand-offs wait for it."""
    pair = EnginePair(
        folder,
        prefill_blocks=64,
        decode_blocks=decode_blocks,
        max_num_batched_tokens=CHUNK_TOKENS,
    )
    numbers, sampling = random.Random(8), SamplingParams(temperature=0.0, max_tokens=6)
    router = PairRouter(pair)
    for number in range(NUM_AT_ONCE):
        router.start(make_request(f"r{number}", draw_prompt(numbers, 20), sampling=sampling))
    pair.may_deliver = False
    with WorkCounter() as work:
        log = HandoffLog(pair, work)
        while router.open:
            pair.turn()
            deliver_some(pair)
            log.note()
            router.read()
    assert len(log.times_s) == NUM_AT_ONCE
    (second_s, second_lines), (last_s, last_lines) = log.quarter(1), log.quarter(3)
    assert second_s > 0, "nobody waited for the link"
    assert last_s <= 1.5 * second_s
    # Fewer are left to look after, so that work falls unless something is kept of those that ended.
    assert last_lines <= 0.9 * second_lines
    pair.settle()
    pair.assert_ledger()
