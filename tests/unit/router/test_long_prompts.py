"""A long prompt that is told back to its client does not hold up the others."""

import asyncio
import selectors
import time
from collections.abc import Awaitable, Callable

import pytest

from pdserve.request import FrontId, Request, RequestId, SamplingParams
from pdserve.rpc.v1 import inference_pb2, types_pb2
from pdserve.tokenizer import Tokenizer
from router.openai.json_parts import encode_in_turns
from router.openai.logprobs import (
    CompletionLogprobs,
    PromptLogprobs,
    TokenTexts,
    chat_logprobs_parts,
)
from router.prompt import MAX_IDS_ON_LOOP, RequestMaker
from router.validation import MAX_PROMPT_LOGPROB_ENTRIES
from tests.support.router_harness import let_others_run
from tests.support.text_models import make_text_model

LONG = 131_072
MAX_TURN_CPU_S = 0.02


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(make_text_model(tmp_path_factory.mktemp("model")))


class TurnWatch(selectors.DefaultSelector):
    """What a loop waits in; knows the CPU time that its thread spent between two waits."""

    def __init__(self) -> None:
        super().__init__()
        self.longest_s = 0.0
        self._began_s = time.thread_time()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.longest_s = max(self.longest_s, time.thread_time() - self._began_s)
        found = super().select(timeout)
        self._began_s = time.thread_time()
        return found


def longest_turn_cpu_s(act: Callable[[], Awaitable[object]]) -> float:
    """Returns the most CPU time that a loop's thread spends in one turn."""
    watch = TurnWatch()

    async def run() -> None:
        # From here on: what the loop itself needs to begin is not meant.
        watch.longest_s = 0.0
        await act()

    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(watch)) as runner:
        runner.run(run())
        return watch.longest_s


def least_of(num_tries: int, act: Callable[[], Awaitable[object]]) -> float:
    """Returns the shortest of the longest turns: a collection of garbage may fall in one."""
    return min(longest_turn_cpu_s(act) for _ in range(num_tries))


def test_a_turn_that_computes_for_long_is_seen():
    async def compute_without_a_break() -> None:
        end_s = time.thread_time() + 2 * MAX_TURN_CPU_S
        while time.thread_time() < end_s:
            pass

    async def compute_in_turns() -> None:
        for _ in range(4):
            end_s = time.thread_time() + MAX_TURN_CPU_S / 4
            while time.thread_time() < end_s:
                pass
            await let_others_run(1)

    assert least_of(1, compute_without_a_break) > MAX_TURN_CPU_S
    assert least_of(3, compute_in_turns) < MAX_TURN_CPU_S


def request_with(num_tokens: int, *, echo: bool) -> Request:
    return Request(
        request_id=RequestId("long"),
        token_ids=tuple(3 + number % 300 for number in range(num_tokens)),
        num_prompt_tokens=num_tokens,
        sampling=SamplingParams(max_tokens=1, echo=echo),
        front_id=FrontId("front"),
    )


def maker_of(tokenizer: Tokenizer) -> RequestMaker:
    def no_limits() -> None:
        raise AssertionError("an echo has no limits of its own")

    return RequestMaker(tokenizer, None, no_limits, (), FrontId("front"))  # type: ignore[arg-type]


@pytest.mark.parametrize("num_tokens", [1, MAX_IDS_ON_LOOP, MAX_IDS_ON_LOOP + 1])
async def test_an_echo_is_the_same_on_the_loop_and_in_a_thread(tokenizer, num_tokens):
    request = request_with(num_tokens, echo=True)
    echo = await maker_of(tokenizer).make_echo(request)
    assert tuple(echo.token_ids) == request.token_ids
    assert echo.text == await tokenizer.decode(request.token_ids)
    assert not echo.logprobs


async def test_nothing_is_echoed_unasked(tokenizer):
    assert await maker_of(tokenizer).make_echo(request_with(LONG, echo=False)) is None


def test_the_echo_of_a_long_prompt_leaves_the_loop_its_turns(tokenizer):
    maker, request = maker_of(tokenizer), request_with(LONG, echo=True)
    assert least_of(3, lambda: maker.make_echo(request)) < MAX_TURN_CPU_S


def test_a_long_text_is_encoded_in_turns():
    body = {"index": 0, "text": "some words of a text\n" * 800_000}
    assert least_of(2, lambda: encode_in_turns(body)) < MAX_TURN_CPU_S


def prompt_of(num_tokens: int, num_top: int) -> inference_pb2.PromptChunk:
    top = [types_pb2.TopLogprob(token_id=3 + rank, logprob=-rank) for rank in range(num_top)]
    chunk = inference_pb2.PromptChunk(first_position=1)
    for number in range(num_tokens):
        chunk.logprobs.add(token_id=3 + number % 300, logprob=-1.5, top=top)
    return chunk


@pytest.mark.parametrize("num_top", [0, 20])
@pytest.mark.parametrize("kind", ["prompt", "completions", "chat"])
def test_log_probs_of_a_long_prompt_are_encoded_in_turns(tokenizer, num_top, kind):
    # A quarter of what one answer may tell.
    chunk = prompt_of(MAX_PROMPT_LOGPROB_ENTRIES // 4 // (num_top + 1), num_top)
    texts = TokenTexts(tokenizer.table)

    def shown() -> object:
        if kind == "prompt":
            return PromptLogprobs(texts, num_top).parts(chunk.logprobs)
        if kind == "chat":
            return chat_logprobs_parts(texts, chunk.logprobs)
        lists = CompletionLogprobs(texts, num_top, skip_special_tokens=True)
        return lists.parts((chunk.logprobs,), {})

    async def encode() -> list[bytes]:
        return await encode_in_turns(shown())

    assert least_of(2, encode) < MAX_TURN_CPU_S
