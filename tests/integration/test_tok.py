"""TOK with a real model on a real cluster: ids equal transformers', and both modes agree."""

import asyncio
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from launcher.client import Generation
from pdserve.rpc.v1 import types_pb2
from tests.support.cluster import TEST_ENGINE, ClusterHarness, HarnessClient, running_cluster
from tests.support.models import smollm2_folder  # noqa: F401
from tests.support.oracle_model import OracleModel
from tests.support.oracles import assert_ledger, assert_not_recomputed, assert_one_end

NUM_TOKENS = 8
BLOCK_SIZE = 16
TEXT = (
    "The prefill workers read the whole prompt at once, and the decode workers write the answer "
    "one token after another; between them travel the blocks of the cache, numbered and checked. "
)
CHAT = (("system", "You answer in one word."), ("user", "What is two plus two?"))
TEXTS = {
    "raw": "The capital of France is",
    "unicode": "日本の首都は東京です。 Größe, naïve café \U0001f5fc\U0001f469\u200d\U0001f52c und",
    "one_token": "Hi",
}
LENGTHS = (15, 16, 17, 31, 32, 33, 1030)
NAMES = (*TEXTS, "chat", *(f"length_{length}" for length in LENGTHS))
SEEDED = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "seed": 2**63 + 5, "max_tokens": 16}

Fields = dict[str, object]


class Prompts:
    """Every prompt in the form that a client sends, and as the ids that the oracle reads."""

    def __init__(self, folder: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        messages = [{"role": role, "content": content} for role, content in CHAT]
        rendered = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        words: list[int] = tokenizer(TEXT * 30).input_ids
        self.fields: dict[str, Fields] = {name: {"text": text} for name, text in TEXTS.items()}
        self.ids: dict[str, list[int]] = {
            name: tokenizer(text).input_ids for name, text in TEXTS.items()
        }
        self.fields["chat"] = {"chat": CHAT}
        self.ids["chat"] = tokenizer(rendered, add_special_tokens=False).input_ids
        for offset, length in enumerate(LENGTHS):
            # Different beginnings, or one prompt would warm the cache of the next.
            ids = words[offset : offset + length]
            assert len(ids) == length
            self.ids[f"length_{length}"] = ids
            self.fields[f"length_{length}"] = {"prompt_ids": ids}


@pytest.fixture(scope="module")
def prompts(smollm2_folder: Path) -> Prompts:  # noqa: F811
    return Prompts(smollm2_folder)


@pytest.fixture(scope="module")
def expected(smollm2_folder: Path, prompts: Prompts) -> dict[str, list[int]]:  # noqa: F811
    """What transformers says, one prompt at a time."""
    oracle = OracleModel(smollm2_folder)
    return {name: oracle.generate(prompts.ids[name], NUM_TOKENS) for name in NAMES}


@pytest.fixture(scope="module")
def split(smollm2_folder: Path, expected: dict[str, list[int]]) -> Iterator[ClusterHarness]:  # noqa: F811
    """One prefill and one decode worker; started after the oracle has gone."""
    with running_smollm2(smollm2_folder, num_prefill=1) as harness:
        yield harness


@pytest.fixture(scope="module")
def colocated(smollm2_folder: Path) -> Iterator[ClusterHarness]:  # noqa: F811
    """`--prefill 0`: one worker does both, so nothing is handed off."""
    with running_smollm2(smollm2_folder, num_prefill=0) as harness:
        yield harness


def running_smollm2(folder: Path, num_prefill: int) -> AbstractContextManager[ClusterHarness]:
    engine = replace(
        TEST_ENGINE, model=str(folder), max_model_len=2048, kv_cache_memory_bytes=256 << 20
    )
    return running_cluster(folder, num_prefill=num_prefill, engine=engine)


async def run_greedy(client: HarnessClient, fields: Fields) -> Generation:
    found = await client.generate(**fields, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    assert_one_end(found)
    return found


def cached_tokens(found: Generation) -> int:
    assert found.usage is not None
    return found.usage.cached_tokens


@pytest.mark.parametrize("name", NAMES)
async def test_TOK_A12_greedy_equals_transformers_cold_and_with_a_cached_prefix(
    split: ClusterHarness, prompts: Prompts, expected: dict[str, list[int]], name: str
) -> None:
    num_prompt = len(prompts.ids[name])
    async with split.connect() as client:
        cold = await run_greedy(client, prompts.fields[name])
        warm = await run_greedy(client, prompts.fields[name])
    assert cold.token_ids == expected[name]
    assert warm.token_ids == expected[name]
    assert cold.usage is not None
    assert cold.usage.prompt_tokens == num_prompt
    assert cached_tokens(cold) == 0
    # All full blocks but never the last token, whose logits are needed.
    assert cached_tokens(warm) == (num_prompt - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert_not_recomputed(cold)


async def test_TOK_four_at_once_equal_transformers(
    split: ClusterHarness, prompts: Prompts, expected: dict[str, list[int]]
) -> None:
    names = ("raw", "unicode", "chat", "length_1030")
    async with split.connect() as client:
        found = await asyncio.gather(*(run_greedy(client, prompts.fields[name]) for name in names))
        await assert_ledger(client, num_workers=2)
    assert [one.token_ids for one in found] == [expected[name] for name in names]


async def test_TOK_a_shared_beginning_changes_no_token_of_the_rest(
    split: ClusterHarness,
    prompts: Prompts,
    smollm2_folder: Path,  # noqa: F811
) -> None:
    ids = [*prompts.ids["length_33"], *prompts.ids["unicode"]]
    async with split.connect() as client:
        await run_greedy(client, prompts.fields["length_33"])
        found = await run_greedy(client, {"prompt_ids": ids})
    assert cached_tokens(found) == 2 * BLOCK_SIZE
    assert found.token_ids == OracleModel(smollm2_folder).generate(ids, NUM_TOKENS)


@pytest.mark.parametrize("name", ["chat", "length_33"])
async def test_TOK_seeded_sampling_is_the_same_split_and_colocated(
    split: ClusterHarness, colocated: ClusterHarness, prompts: Prompts, name: str
) -> None:
    request = {**prompts.fields[name], **SEEDED, "ignore_eos": True}
    found = []
    for harness in (split, colocated):
        async with harness.connect() as client:
            found.append(await client.generate(**request))
    assert found[0].token_ids == found[1].token_ids
    assert found[0].text == found[1].text
    async with split.connect() as client:
        other = await client.generate(**{**request, "seed": 6})
    assert other.token_ids != found[0].token_ids


@pytest.mark.parametrize("count", [0, 1, 5, 20])
async def test_A14_logprobs_are_the_same_split_and_colocated_first_token_included(
    split: ClusterHarness, colocated: ClusterHarness, prompts: Prompts, count: int
) -> None:
    request = {**prompts.fields["length_17"], "max_tokens": 6, "temperature": 0.0}
    found: list[list[types_pb2.TokenLogprob]] = []
    for harness in (split, colocated):
        async with harness.connect() as client:
            generation = await client.generate(**request, logprobs=count, ignore_eos=True)
        assert [one.token_id for one in generation.logprobs] == generation.token_ids
        found.append(generation.logprobs)
    assert found[0] == found[1]
    for one in found[0]:
        assert len(one.top) == count
        assert -20.0 < one.logprob <= 0.0
        shown = [top.logprob for top in one.top]
        assert shown == sorted(shown, reverse=True)
        if one.top:
            assert (one.top[0].token_id, one.top[0].logprob) == (one.token_id, one.logprob)
