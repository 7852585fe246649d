"""SmolLM2's own weights on three tensor ranks, in real processes, against one rank."""

from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.config.engine import EngineConfig
from pdserve.engine.model_runner import ModelRunner
from pdserve.models.registry import load_model
from tests.support.cluster import TEST_ENGINE, running_cluster
from tests.support.generation import generate, make_request, make_runner
from tests.support.models import smollm2_folder  # noqa: F401
from tests.support.oracles import assert_ledger, assert_not_recomputed, assert_one_end

NUM_TOKENS = 12
PROMPTS = tuple(
    tuple((997 * index + 31 * seed) % 48_000 + 100 for index in range(length))
    for seed, length in enumerate((5, 130))
)


@pytest.fixture(scope="module")
def expected(smollm2_folder: Path) -> list[list[int]]:  # noqa: F811
    """Greedy tokens of one rank."""
    engine = EngineConfig(model=str(smollm2_folder), max_model_len=512)
    runner: ModelRunner = make_runner(load_model(smollm2_folder, engine), engine)
    return [generate(runner, make_request(prompt), NUM_TOKENS, range(32)) for prompt in PROMPTS]


@pytest.mark.soak
@pytest.mark.parametrize(("prefill", "decode"), [(3, 1), (1, 3)], ids=["3x1-1x1", "1x1-3x1"])
async def test_A15_TOK_smollm2_on_three_tensor_ranks_gives_the_tokens_of_one(
    smollm2_folder: Path,  # noqa: F811
    expected: list[list[int]],
    prefill: int,
    decode: int,
) -> None:
    engine = replace(
        TEST_ENGINE,
        model=str(smollm2_folder),
        max_model_len=512,
        tensor_parallel=prefill,
        kv_cache_memory_bytes=64 << 20,
    )
    with running_cluster(
        smollm2_folder, engine=engine, decode_tensor_parallel=decode, decode_pipeline_parallel=1
    ) as harness:
        async with harness.connect() as client:
            for prompt, tokens in zip(PROMPTS, expected, strict=True):
                found = await client.generate(
                    prompt_ids=prompt, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True
                )
                assert list(found.token_ids) == tokens
                assert_one_end(found)
                assert_not_recomputed(found)
            await assert_ledger(client, num_workers=2)
        members = harness.cluster.members()
        num_ranks = [len(m.record.rank_pids) for m in members if m.record is not None]
        assert num_ranks == [prefill, decode]
