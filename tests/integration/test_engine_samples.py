"""Several samples of one prompt over both pools' engines: one prefill, one hand-off, n outputs."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from pdserve.config.worker import HandoffConfig
from pdserve.request import Request, SamplingParams
from tests.support.engine_pair import EnginePair
from tests.support.engine_requests import make_request
from tests.support.pair_router import PairRouter
from tests.support.tiny_models import make_tiny_llama

PROMPTS = {"partial": tuple(range(5, 46)), "full": tuple(range(5, 53)), "short": (9, 8, 7)}
"""Ends within a block of 16, at the end of one, and within the first."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"))


def make_group(n: int, prompt: str = "partial", **sampling: object) -> Request:
    settings = {"temperature": 1.0, "seed": 11, "max_tokens": 24, **sampling}
    return make_request("g", PROMPTS[prompt], sampling=SamplingParams(n=n, **settings))


def run_apart(folder: Path, group: Request) -> dict[str, list[int]]:
    """The reference: each sample as a request of its own, with its seed and sample index."""
    outputs: dict[str, list[int]] = {}
    for one in group.samples():
        outputs |= EnginePair(folder).run([one])
    return outputs


def run_turns(pair: EnginePair, router: PairRouter, max_turns: int = 4000) -> None:
    for _ in range(max_turns):
        if not router.open:
            pair.settle()
            return
        pair.turn()
        router.read()
    raise AssertionError(f"still open: {sorted(router.open)}")


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("n", [2, 4, 8])
def test_A13_samples_equal_separate_runs_and_the_prompt_is_computed_and_shipped_once(
    folder: Path, n: int, prompt: str
) -> None:
    group = make_group(n, prompt)
    pair = EnginePair(folder)
    outputs = pair.run([group])
    assert outputs == run_apart(folder, group)
    assert len({tuple(ids) for ids in outputs.values()}) == n
    alone = EnginePair(folder)
    alone.run([make_request("g", PROMPTS[prompt], sampling=SamplingParams(max_tokens=4))])
    assert pair.links.bytes_sent == alone.links.bytes_sent
    prefill, decode = (engine.describe().counters for engine in (pair.prefill, pair.decode))
    assert prefill.prompt_tokens == len(PROMPTS[prompt])
    assert decode.prompt_tokens == 0
    assert decode.handoffs_completed == 1
    pair.assert_ledger()


@pytest.mark.parametrize("n", [2, 8])
def test_A13_a_colocated_worker_computes_the_prompt_once(folder: Path, n: int) -> None:
    group = make_group(n)
    pair = EnginePair(folder)
    router = PairRouter(pair)
    router.adopt(group)
    pair.submit(group, is_local=True)
    run_turns(pair, router)
    assert router.outputs == run_apart(folder, group)
    assert pair.decode.describe().counters.prompt_tokens == len(group.token_ids)
    pair.assert_ledger()


def test_some_samples_end_with_their_first_token_on_prefill_and_the_rest_go_on(
    folder: Path,
) -> None:
    firsts = {name: ids[0] for name, ids in run_apart(folder, make_group(8)).items()}
    stop_id = firsts["g#3"]
    group = make_group(8, stop_token_ids=(stop_id,))
    ended = {name for name, token in firsts.items() if token == stop_id}
    assert 0 < len(ended) < 8
    pair = EnginePair(folder)
    outputs = pair.run([group])
    assert outputs == run_apart(folder, group)
    assert {name for name, ids in outputs.items() if len(ids) == 1} == ended
    assert pair.decode.describe().counters.handoffs_completed == 1
    pair.assert_ledger()


def test_a_group_whose_samples_all_end_on_prefill_ships_nothing_to_a_batch(folder: Path) -> None:
    pair = EnginePair(folder)
    outputs = pair.run([make_group(4, max_tokens=1)])
    assert sorted(len(ids) for ids in outputs.values()) == [1] * 4
    assert pair.decode.describe().counters.handoffs_completed == 0
    pair.assert_ledger()


def test_B5_preempted_samples_come_back_alone_and_change_no_token(folder: Path) -> None:
    groups = [
        replace(make_group(4, max_tokens=48), request_id=f"g{i}", handoff_id=f"h{i}")
        for i in range(3)
    ]
    calm: dict[str, list[int]] = {}
    for group in groups:
        calm |= EnginePair(folder).run([group])
    pair = EnginePair(folder, decode_blocks=24)
    router = PairRouter(pair)
    for group in groups:
        router.start(group)
    run_turns(pair, router, max_turns=20_000)
    assert router.outputs == calm
    assert router.num_returned >= 3
    pair.assert_ledger()


def test_penalties_count_each_sample_by_itself_over_preemption(folder: Path) -> None:
    sampling = {"presence_penalty": 1.5, "frequency_penalty": 0.7, "repetition_penalty": 1.3}
    group = make_group(4, max_tokens=40, temperature=0.7, **sampling)
    calm = run_apart(folder, group)
    pair = EnginePair(folder, decode_blocks=9)
    router = PairRouter(pair)
    router.start(group)
    run_turns(pair, router, max_turns=20_000)
    assert router.outputs == calm
    assert router.num_returned >= 1
    pair.assert_ledger()


@pytest.mark.parametrize("turns", range(0, 12, 2))
@pytest.mark.parametrize("side", ["prefill", "decode", "both"])
def test_A6_all_samples_cancelled_at_any_moment_give_every_block_back(
    folder: Path, turns: int, side: str
) -> None:
    pair = EnginePair(
        folder, max_num_batched_tokens=64, handoff=HandoffConfig(frame_tokens=64, lease_s=0.2)
    )
    group = make_request(
        "g", tuple(range(3, 283)), sampling=SamplingParams(n=3, seed=2, max_tokens=64)
    )
    pair.submit(group)
    for _ in range(turns):
        pair.turn()
    for one in group.samples():
        if side != "decode":
            pair.cancel(pair.prefill, one)
        if side != "prefill":
            pair.cancel(pair.decode, one)
    for _ in range(120):
        pair.turn()
    pair.assert_ledger()


@pytest.mark.parametrize("turns", range(0, 12, 2))
def test_one_sample_cancelled_at_any_moment_leaves_the_others_alone(
    folder: Path, turns: int
) -> None:
    group = make_group(3)
    calm = run_apart(folder, group)
    pair = EnginePair(folder, max_num_batched_tokens=16)
    router = PairRouter(pair)
    router.start(group)
    for _ in range(turns):
        pair.turn()
        router.read()
    for engine in (pair.prefill, pair.decode):
        pair.cancel(engine, group.sample(1))
    router.open.pop("g#1", None)
    run_turns(pair, router)
    assert {name: router.outputs[name] for name in ("g#0", "g#2")} == {
        name: calm[name] for name in ("g#0", "g#2")
    }
    pair.assert_ledger()


def test_refused_samples_are_placed_again_together_without_a_second_prefill(folder: Path) -> None:
    group = make_group(4)
    pair = EnginePair(folder)
    first = make_request("first", tuple(range(9, 250)))
    hog = EnginePair(folder, decode_blocks=18)
    router = PairRouter(hog)
    router.start(first)
    router.start(group)
    run_turns(hog, router, max_turns=20_000)
    assert hog.decode.describe().counters.handoffs_refused >= 1
    assert hog.prefill.describe().counters.prompt_tokens == len(first.token_ids) + len(
        group.token_ids
    )
    expected = pair.run([group])
    assert {name: router.outputs[name] for name in expected} == expected
    hog.assert_ledger()


@pytest.mark.parametrize("chunk_tokens", [16, 37, 256])
def test_A14_prompt_logprobs_are_those_of_transformers_at_any_chunk_size(
    folder: Path, chunk_tokens: int
) -> None:
    prompt = tuple(range(3, 203))
    sampling = SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=2, logprobs=2)
    pair = EnginePair(folder, max_num_batched_tokens=chunk_tokens)
    found = []
    # The second time the prompt is cached, and must be computed all the same.
    for name in ("cold", "warm"):
        router = PairRouter(pair)
        router.start(make_request(name, prompt, sampling=sampling))
        run_turns(pair, router)
        found.append(router.prompt_logprobs[name])
        assert len(router.logprobs[name]) == 3
    assert found[0] == found[1]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0].double().log_softmax(1)
    assert sorted(found[0]) == list(range(1, len(prompt)))
    for position, one in found[0].items():
        row = expected[position - 1]
        assert one.token_id == prompt[position]
        assert one.logprob == pytest.approx(float(row[prompt[position]]), abs=1e-4)
        best = row.topk(2).values.tolist()
        assert [top.logprob for top in one.top] == pytest.approx(best, abs=1e-4)
    pair.assert_ledger()


def test_A14_prompt_logprobs_of_a_group_are_told_once_by_its_first_sample(folder: Path) -> None:
    pair = EnginePair(folder)
    router = PairRouter(pair)
    router.start(make_group(3, prompt_logprobs=0))
    run_turns(pair, router)
    assert len(router.prompt_logprobs["g#0"]) == len(PROMPTS["partial"]) - 1
    assert router.prompt_logprobs["g#1"] == router.prompt_logprobs["g#2"] == {}
