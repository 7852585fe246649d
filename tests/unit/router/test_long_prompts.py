"""A long prompt that is told back to its client does not hold up the others."""

import asyncio
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
from tests.support.text_models import make_text_model

LONG = 131_072
MAX_TURN_CPU_S = 0.02


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(make_text_model(tmp_path_factory.mktemp("model")))


async def longest_turn_cpu_s(act: Callable[[], Awaitable[object]]) -> float:
    """Returns the most CPU time that the loop's thread spent between two turns of a task."""
    longest_s = 0.0
    acting = asyncio.ensure_future(act())
    while not acting.done():
        before_s = time.thread_time()
        await asyncio.sleep(0)
        longest_s = max(longest_s, time.thread_time() - before_s)
        # The work in a thread needs the lock; a loop has nothing to do most of the time.
        await asyncio.sleep(0.001)
    await acting
    return longest_s


async def least_of(num_tries: int, act: Callable[[], Awaitable[object]]) -> float:
    """Returns the shortest of the longest turns: a collection of garbage may fall in one."""
    return min([await longest_turn_cpu_s(act) for _ in range(num_tries)])


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


async def test_the_echo_of_a_long_prompt_leaves_the_loop_its_turns(tokenizer):
    maker, request = maker_of(tokenizer), request_with(LONG, echo=True)
    assert await least_of(3, lambda: maker.make_echo(request)) < MAX_TURN_CPU_S


async def test_a_long_text_is_encoded_in_turns():
    body = {"index": 0, "text": "some words of a text\n" * 800_000}
    assert await least_of(2, lambda: encode_in_turns(body)) < MAX_TURN_CPU_S


def prompt_of(num_tokens: int, num_top: int) -> inference_pb2.PromptChunk:
    top = [types_pb2.TopLogprob(token_id=3 + rank, logprob=-rank) for rank in range(num_top)]
    chunk = inference_pb2.PromptChunk(first_position=1)
    for number in range(num_tokens):
        chunk.logprobs.add(token_id=3 + number % 300, logprob=-1.5, top=top)
    return chunk


@pytest.mark.parametrize("num_top", [0, 20])
@pytest.mark.parametrize("kind", ["prompt", "completions", "chat"])
async def test_log_probs_of_a_long_prompt_are_encoded_in_turns(tokenizer, num_top, kind):
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

    assert await least_of(2, encode) < MAX_TURN_CPU_S
