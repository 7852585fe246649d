"""The official SDK, unmodified, against a front."""

import asyncio

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.support.fake_tokens import expected_tokens
from tests.support.http_client import add_pair
from tests.support.router_harness import eventually, run_cluster

MESSAGES = [{"role": "user", "content": "hi"}]
KEY = "sdk-key"


@pytest.fixture
async def served(text_folder):
    async with run_cluster(text_folder, api_keys=(KEY,)) as cluster:
        await add_pair(cluster, token_delay_s=0.002)
        yield cluster


@pytest.fixture
async def sdk(served):
    async with AsyncOpenAI(api_key=KEY, base_url=_url(served), max_retries=0) as client:
        yield client


def _url(cluster) -> str:
    return f"http://127.0.0.1:{cluster.front.http_port}/v1"


async def test_chat_whole_and_streamed_agree(sdk):
    whole = await sdk.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=12)
    stream = await sdk.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert chunks[-1].usage == whole.usage
    assert whole.usage.prompt_tokens_details.cached_tokens == 16


async def test_chat_logprobs_have_tokens_bytes_and_alternatives(sdk):
    found = await sdk.chat.completions.create(
        model="tiny", messages=MESSAGES, max_completion_tokens=4, logprobs=True, top_logprobs=2
    )
    entries = found.choices[0].logprobs.content
    assert len(entries) == 4
    for number, entry in enumerate(entries):
        assert entry.logprob == -float(number)
        assert len(entry.top_logprobs) == 2
    joined = b"".join(bytes(entry.bytes) for entry in entries)
    assert joined.decode("utf-8", "replace") == found.choices[0].message.content


async def test_the_sdks_own_stream_helper_gathers_the_answer(sdk):
    async with sdk.chat.completions.stream(model="tiny", messages=MESSAGES, max_tokens=6) as stream:
        kinds = [event.type async for event in stream]
        with pytest.raises(openai.LengthFinishReasonError) as found:
            await stream.get_final_completion()
    assert "content.delta" in kinds
    message = found.value.completion.choices[0].message
    assert (message.role, bool(message.content)) == ("assistant", True)


async def test_completions_take_all_forms_of_a_prompt(sdk):
    forms = {"the fox": 1, ("a", "b"): 2, (5, 6, 7): 1, ((5, 6), (7, 8, 9)): 2}
    for prompt, count in forms.items():
        given = prompt if isinstance(prompt, str) else _listed(prompt)
        found = await sdk.completions.create(model="tiny", prompt=given, max_tokens=3, logprobs=1)
        assert [choice.index for choice in found.choices] == list(range(count))
        assert len(found.choices[0].logprobs.tokens) == 3


def _listed(value):
    return [_listed(v) for v in value] if isinstance(value, tuple) else value


async def test_extra_body_reaches_the_engine(sdk):
    found = await sdk.completions.create(
        model="tiny",
        prompt=[5, 6, 7],
        max_tokens=9,
        extra_body={"ignore_eos": True, "min_tokens": 9, "return_token_ids": True},
    )
    assert found.choices[0].token_ids == expected_tokens([5, 6, 7], 9)


async def test_errors_become_the_sdks_types(sdk, served):
    with pytest.raises(openai.BadRequestError) as bad:
        await sdk.chat.completions.create(model="tiny", messages=MESSAGES, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        await sdk.chat.completions.create(model="other", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        await sdk.with_options(api_key="wrong").models.list()
    served.front.intake.is_draining = True
    with pytest.raises(openai.InternalServerError) as draining:
        await sdk.chat.completions.create(model="tiny", messages=MESSAGES)
    assert draining.value.status_code == 503


async def test_an_error_in_mid_stream_is_raised(text_folder):
    async with run_cluster(text_folder) as cluster:
        await add_pair(cluster, fail_before=4)
        async with AsyncOpenAI(api_key="x", base_url=_url(cluster), max_retries=0) as sdk:
            stream = await sdk.chat.completions.create(
                model="tiny", messages=MESSAGES, max_tokens=9, stream=True
            )
            with pytest.raises(openai.APIError):
                async for _ in stream:
                    pass
        await cluster.quiet()


async def test_closing_a_stream_cancels_the_request(sdk, served):
    stream = await sdk.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=2000, stream=True
    )
    async for _ in stream:
        break
    await eventually(lambda: served.front.dispatcher.num_in_flight == 1)
    await stream.close()
    await served.quiet()


async def test_models_show_the_effective_length(sdk):
    listed = await sdk.models.list()
    assert [model.id for model in listed.data] == ["tiny"]
    assert listed.data[0].max_model_len == 4096
    assert (await sdk.models.retrieve("tiny")).id == "tiny"


async def test_raw_response_has_the_request_id(sdk):
    raw = await sdk.chat.completions.with_raw_response.create(
        model="tiny", messages=MESSAGES, max_tokens=1, extra_headers={"x-request-id": "abc"}
    )
    assert raw.headers["x-request-id"] == "abc"
    assert raw.parse()._request_id == "abc"


async def test_the_sync_client_works_as_well(served):
    def talk() -> tuple[str | None, str]:
        with OpenAI(api_key=KEY, base_url=_url(served), max_retries=0) as client:
            whole = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=5)
            stream = client.completions.create(model="tiny", prompt="a", max_tokens=5, stream=True)
            return whole.choices[0].message.content, "".join(c.choices[0].text for c in stream)

    chat, text = await asyncio.to_thread(talk)
    assert chat
    assert text
