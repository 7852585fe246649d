"""The client API at its edges, over real workers: every answer is a result or a named refusal."""

import asyncio
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from tokenizers import Tokenizer

from launcher.client import Generation
from pdserve.rpc.v1 import inference_pb2, types_pb2
from tests.support.cluster import TEST_ENGINE, ClusterHarness, HarnessClient, running_cluster
from tests.support.models import tiny_llama_folder  # noqa: F401
from tests.support.oracles import Canary, assert_ledger, assert_one_end
from tests.support.statuses import Failure, fail, try_request

BLOCK_BYTES = 8192
"""Of the tiny model's KV, 16 tokens."""
ROOM_TOKENS = 800
PROMPT = tuple(range(10, 40))
EOS = 2
INVALID = grpc.StatusCode.INVALID_ARGUMENT


@pytest.fixture(scope="module")
def cluster(tiny_llama_folder: Path) -> Iterator[ClusterHarness]:  # noqa: F811
    """1 prefill and 1 decode worker with KV for 800 tokens, less than the 1,024 asked for."""
    engine = replace(
        TEST_ENGINE,
        model=str(tiny_llama_folder),
        kv_cache_memory_bytes=ROOM_TOKENS // 16 * BLOCK_BYTES,
    )
    with running_cluster(tiny_llama_folder, engine=engine) as harness:
        yield harness


@pytest.fixture(scope="module")
def tokenizer(tiny_llama_folder: Path) -> Tokenizer:  # noqa: F811
    return Tokenizer.from_file(str(tiny_llama_folder / "tokenizer.json"))


async def greedy(client: HarnessClient, **fields: object) -> Generation:
    fields = {"prompt_ids": PROMPT, "temperature": 0.0, "ignore_eos": True} | fields
    found = await client.generate(**fields)
    assert_one_end(found)
    return found


async def test_D1_empty_prompts_are_refused_by_field(cluster: ClusterHarness) -> None:
    async with cluster.connect() as client:
        canary = await Canary.hatch(cluster, client)
        for fields, name in (
            ({"text": ""}, "text"),
            ({"prompt_ids": []}, "token_ids"),
            ({"prompt_ids": [EOS]}, "token_ids"),
            ({"text": "<|im_end|>"}, "text"),
            ({"prompt_ids": [384]}, "token_ids"),
            ({"prompt_ids": [2**32 - 1]}, "token_ids"),
            ({"chat": [("robot", "hi")]}, "chat.messages[0].role"),
        ):
            failure = await fail(client, **fields)
            assert (failure.code, failure.fields) == (INVALID, (name,)), failure
        for request, name in (
            (inference_pb2.GenerateRequest(), "prompt"),
            (inference_pb2.GenerateRequest(chat=inference_pb2.ChatPrompt()), "chat.messages"),
        ):
            failure = await fail(client, request)
            assert (failure.code, failure.fields) == (INVALID, (name,)), failure
        await canary.assert_alive(client)


async def test_D2_the_limit_is_what_the_workers_can_hold_to_the_token(
    cluster: ClusterHarness,
) -> None:
    async with cluster.connect() as client:
        canary = await Canary.hatch(cluster, client)
        info = await client.stub.GetModelInfo(inference_pb2.GetModelInfoRequest(), timeout=10)
        limit = info.max_model_len
        assert limit == ROOM_TOKENS
        for num_prompt, max_tokens in ((limit - 1, 1), (limit - 2, 2), (limit - 60, 60)):
            ids = [5 + n % 300 for n in range(num_prompt)]
            found = await greedy(client, prompt_ids=ids, max_tokens=max_tokens)
            assert len(found.token_ids) == max_tokens
        rest = await greedy(client, prompt_ids=[7] * (limit - 3))
        assert len(rest.token_ids) == 3
        for num_prompt, max_tokens, name in (
            (limit, 1, "token_ids"),
            (limit + 1, 1, "token_ids"),
            (10 * limit, 1, "token_ids"),
            (limit - 1, 2, "sampling.max_tokens"),
            (limit - 60, 61, "sampling.max_tokens"),
            (1, 2**63 - 1, "sampling.max_tokens"),
        ):
            failure = await fail(client, prompt_ids=[7] * num_prompt, max_tokens=max_tokens)
            assert (failure.code, failure.reason) == (INVALID, "TOO_LONG")
            assert failure.fields == (name,)
            assert str(limit) in failure.message
        failure = await fail(client, text="x" * (100 * limit))
        assert (failure.code, failure.reason) == (INVALID, "TOO_LONG")
        await canary.assert_alive(client)
        await assert_ledger(client, num_workers=2)


async def test_D3_every_max_tokens_has_a_defined_result(cluster: ClusterHarness) -> None:
    async with cluster.connect() as client:
        for value in (0, -1, -(2**63), 2**31, 2**63 - 1):
            failure = await fail(client, prompt_ids=PROMPT, max_tokens=value)
            assert (failure.code, failure.fields) == (INVALID, ("sampling.max_tokens",)), value
        for value in (1, 2):
            assert len((await greedy(client, max_tokens=value)).token_ids) == value
        assert len((await greedy(client)).token_ids) == 256


EDGE_REALS = (
    math.nan, math.inf, -math.inf, -1.0, -1e-9, -0.0, 0.0, 5e-324, 1e-300, 1e-30, 1e-9, 1e-5,
    0.01, 0.5, 1.0, 1.0000001, 2.0, 99.0, 100.0, 100.1, 1e30, 1.7e308,
)  # fmt: skip
EDGE_WHOLES = (-(2**31), -2, -1, 0, 1, 2, 19, 20, 21, 383, 384, 385, 2**31 - 1)
EDGES: list[tuple[str, object]] = [
    *((name, value) for name in (
        "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty",
        "repetition_penalty",
    ) for value in EDGE_REALS),
    *((name, value) for name in (
        "top_k", "min_tokens", "logprobs", "prompt_logprobs", "n",
    ) for value in EDGE_WHOLES),
    *(("seed", value) for value in (0, 1, 2**32, 2**63, 2**64 - 1)),
    *(("stop", value) for value in ([], [""], ["a"] * 16, ["a"] * 17, ["x" * 256], ["x" * 257])),
    *(("stop_token_ids", value) for value in ([], [0], [383], [384], [1] * 128, [1] * 129)),
    *(("logit_bias", value) for value in ({}, {1: 1.0}, {5: math.nan})),
    *((name, value) for name in ("echo", "ignore_eos", "skip_special_tokens")
      for value in (False, True)),
]  # fmt: skip


async def test_D4_sampling_extremes_are_refused_by_name_or_give_finite_probabilities(
    cluster: ClusterHarness,
) -> None:
    assert len(EDGES) > 200
    async with cluster.connect() as client:
        canary = await Canary.hatch(cluster, client)
        num_refused = 0
        for name, value in EDGES:
            sampling = {"max_tokens": 3, "temperature": 1.0, "logprobs": 2} | {name: value}
            found = await try_request(client, prompt_ids=PROMPT, **sampling)
            if isinstance(found, Failure):
                assert (found.code, found.fields[0].partition("[")[0]) == (
                    INVALID,
                    f"sampling.{name}",
                ), (name, value)
                num_refused += 1
                continue
            assert_one_end(found)
            assert found.logprobs, (name, value)
            for one in found.logprobs:
                assert math.isfinite(one.logprob), (name, value)
                assert all(math.isfinite(top.logprob) for top in one.top), (name, value)
        assert 80 < num_refused < len(EDGES) - 60
        await canary.assert_alive(client)
        await assert_ledger(client, num_workers=2)


async def test_D4_extremes_of_several_fields_together_give_finite_probabilities(
    cluster: ClusterHarness,
) -> None:
    async with cluster.connect() as client:
        canary = await Canary.hatch(cluster, client)
        combinations = [
            {"temperature": temperature, "top_p": top_p, "top_k": top_k}
            for temperature in (0.0, 5e-324, 1e-9, 100.0)
            for top_p in (5e-324, 1e-9, 1.0)
            for top_k in (0, 1, 384, 2**31 - 1)
        ]
        found = await asyncio.gather(
            *(
                client.generate(prompt_ids=PROMPT, max_tokens=3, logprobs=1, seed=1, **one)
                for one in combinations
            )
        )
        expected = await greedy(client, max_tokens=3)
        for fields, one in zip(combinations, found, strict=True):
            assert all(math.isfinite(entry.logprob) for entry in one.logprobs), fields
            is_narrow = fields["top_k"] == 1 or fields["top_p"] < 1 or fields["temperature"] < 1
            if is_narrow:
                assert one.token_ids == expected.token_ids[: len(one.token_ids)], fields
        await canary.assert_alive(client)


async def test_a_message_over_the_limit_is_refused_with_both_sizes(
    cluster: ClusterHarness,
) -> None:
    async with cluster.connect() as client:
        failure = await fail(client, text="x" * (17 << 20))
        assert failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert str(16 << 20) in failure.message
        failure = await fail(client, text="hi", model="another")
        assert (failure.code, failure.reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")
        await greedy(client, max_tokens=1)


class Whole:
    """An undisturbed greedy output whose tokens are all plain text, cut at every border."""

    def __init__(self, ids: list[int], pieces: list[str]) -> None:
        self.ids = ids
        self.pieces = pieces
        self.text = "".join(pieces)

    def num_tokens_until(self, num_characters: int) -> int:
        """Returns how many tokens it takes to have so many characters."""
        total = 0
        for count, piece in enumerate(self.pieces, start=1):
            total += len(piece)
            if total >= num_characters:
                return count
        raise AssertionError("the text is shorter")


async def find_whole(client: HarnessClient, tokenizer: Tokenizer) -> tuple[tuple[int, ...], Whole]:
    """Looks for a prompt with 6 first tokens of ASCII and no repeat of the first two."""
    for start in range(3, 300):
        prompt = tuple(range(start, start + 20))
        found = await greedy(client, prompt_ids=prompt, max_tokens=6)
        pieces = [tokenizer.decode([one]) for one in found.token_ids]
        is_plain = all(piece.isascii() and piece.isprintable() and piece for piece in pieces)
        if is_plain and found.text == "".join(pieces) and len(set(found.token_ids)) == 6:
            return prompt, Whole(found.token_ids, pieces)
    raise AssertionError("no prompt will do")


async def check_stop(
    client: HarnessClient, prompt: tuple[int, ...], whole: Whole, stop: str
) -> None:
    at = whole.text.index(stop)
    num_tokens = whole.num_tokens_until(at + len(stop))
    for include in (False, True):
        found = await greedy(
            client, prompt_ids=prompt, max_tokens=6, stop=[stop], include_stop_in_output=include
        )
        assert found.text == (whole.text[: at + len(stop)] if include else whole.text[:at]), stop
        assert found.token_ids == whole.ids[:num_tokens], stop
        assert found.finish is not None
        assert (found.finish_reason, found.finish.stop_string) == ("stop", stop)


async def test_D8_a_stop_at_any_border_cuts_text_and_ids_at_one_place(
    cluster: ClusterHarness, tokenizer: Tokenizer
) -> None:
    async with cluster.connect() as client:
        prompt, whole = await find_whole(client, tokenizer)
        stops = {
            whole.text[begin:end]
            for begin in range(len(whole.text))
            for end in range(begin + 1, min(begin + 6, len(whole.text)) + 1)
        }
        # Over the hand-off: begins in prefill's token and ends in decode's first one.
        over_handoff = whole.pieces[0][-1] + whole.pieces[1][0]
        assert over_handoff in stops
        checks = [check_stop(client, prompt, whole, stop) for stop in sorted(stops)]
        await asyncio.gather(*checks)
        await assert_ledger(client, num_workers=2)


async def test_D8_two_stops_with_one_beginning_end_at_the_first_that_is_whole(
    cluster: ClusterHarness, tokenizer: Tokenizer
) -> None:
    async with cluster.connect() as client:
        prompt, whole = await find_whole(client, tokenizer)
        border = len(whole.pieces[0])
        short = whole.text[border - 1 : border + 1]
        for stops in ([short, short + whole.text[border + 1]], [short + "\x00", short]):
            found = await greedy(client, prompt_ids=prompt, max_tokens=6, stop=stops)
            assert found.text == whole.text[: whole.text.index(short)]
            assert found.finish is not None
            assert found.finish.stop_string == short


@pytest.mark.parametrize("position", [0, 1, 4])
async def test_a_stop_token_ends_at_prefill_at_the_first_decode_token_and_later(
    cluster: ClusterHarness, tokenizer: Tokenizer, position: int
) -> None:
    async with cluster.connect() as client:
        prompt, whole = await find_whole(client, tokenizer)
        for include in (False, True):
            found = await greedy(
                client,
                prompt_ids=prompt,
                max_tokens=6,
                stop_token_ids=[whole.ids[position]],
                include_stop_in_output=include,
            )
            assert found.token_ids == whole.ids[: position + 1]
            assert found.text == "".join(whole.pieces[: position + include])
            assert found.finish is not None
            assert found.finish.stop_token_id == whole.ids[position]
            assert found.finish_reason == "stop"
        await assert_ledger(client, num_workers=2)


async def test_min_tokens_keeps_stops_and_stop_ids_away(
    cluster: ClusterHarness, tokenizer: Tokenizer
) -> None:
    async with cluster.connect() as client:
        prompt, whole = await find_whole(client, tokenizer)
        for position in (0, 1):
            found = await greedy(
                client,
                prompt_ids=prompt,
                max_tokens=6,
                stop_token_ids=[whole.ids[position]],
                min_tokens=position + 1,
            )
            assert found.token_ids[:position] == whole.ids[:position]
            assert whole.ids[position] not in found.token_ids[: position + 1]
        found = await greedy(
            client, prompt_ids=prompt, max_tokens=6, stop=[whole.pieces[0]], min_tokens=6
        )
        assert found.token_ids == whole.ids
        assert (found.text, found.finish_reason) == (whole.text, "length")


async def test_ignore_eos_runs_past_the_token_that_ends_it_otherwise(
    cluster: ClusterHarness,
) -> None:
    async with cluster.connect() as client:
        sampling = {"prompt_ids": PROMPT, "temperature": 4.0, "max_tokens": 120}
        for seed in range(40):
            past = await client.generate(**sampling, seed=seed, ignore_eos=True)
            if EOS in past.token_ids[:-1]:
                break
        ended = await client.generate(**sampling, seed=seed)
        end = past.token_ids.index(EOS) + 1
        assert len(past.token_ids) == 120
        assert ended.token_ids == past.token_ids[:end]
        assert ended.finish is not None
        assert (ended.finish_reason, ended.finish.stop_token_id) == ("stop", EOS)
        assert past.text.startswith(ended.text)


async def test_D9_streamed_text_is_the_decode_of_all_ids_however_it_is_cut(
    cluster: ClusterHarness, tokenizer: Tokenizer
) -> None:
    text = "東京 \U0001f642\u200d\U0001f643 größer"
    async with cluster.connect() as client:
        # Hot sampling over a byte-level vocabulary: most characters are spread over tokens.
        found = await asyncio.gather(
            *(
                client.generate(
                    text=text,
                    max_tokens=30,
                    temperature=50.0,
                    seed=seed,
                    ignore_eos=True,
                    skip_special_tokens=seed % 2 == 0,
                )
                for seed in range(30)
            )
        )
    for seed, one in enumerate(found):
        expected = tokenizer.decode(one.token_ids, skip_special_tokens=seed % 2 == 0)
        assert one.text == expected
    assert sum("\ufffd" in one.text for one in found) > 10


async def test_A12_cached_tokens_are_0_cold_and_the_shared_blocks_after(
    cluster: ClusterHarness,
) -> None:
    ids = [300 - n % 290 for n in range(100)]
    async with cluster.connect() as client:
        counts = []
        for prompt in (ids, ids, ids[:50], [*ids[:40], 9, 9, 9]):
            usage: types_pb2.Usage | None = (
                await greedy(client, prompt_ids=prompt, max_tokens=2)
            ).usage
            assert usage is not None
            counts.append(usage.cached_tokens)
    assert counts == [0, 96, 48, 32]
