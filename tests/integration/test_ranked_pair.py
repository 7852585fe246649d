"""Sampling, samples and log-probabilities on several ranks: what rank 0 adds must not depend on it.

Prefill and decode workers of unlike shapes in one process, against one rank each.
"""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pdserve.engine.batch import StepPlan
from pdserve.engine.step_codec import PlanEncoder
from pdserve.request import Request, SamplingParams
from tests.support.engine_pair import EnginePair
from tests.support.engine_requests import make_request
from tests.support.pair_router import PairRouter
from tests.support.ranked_pair import RankedSide, ranked_pair
from tests.support.tiny_models import make_tiny_llama

SHAPES = [
    pytest.param((1, 2), (4, 1), id="1x2-4x1"),
    pytest.param((2, 2), (1, 1), id="2x2-1x1"),
    pytest.param((1, 4), (1, 4), id="1x4-1x4"),
    pytest.param((2, 1), (1, 2), id="2x1-1x2", marks=pytest.mark.soak),
    pytest.param((1, 1), (2, 2), id="1x1-2x2", marks=pytest.mark.soak),
]
"""(tensor, stages) of prefill and of decode."""
PROMPT = tuple((11 * index) % 370 + 5 for index in range(90))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"), heads=4, kv_heads=2, num_layers=4)


def run_turns(pair: EnginePair, router: PairRouter, max_turns: int = 4000) -> None:
    for _ in range(max_turns):
        if not router.open:
            pair.settle()
            return
        pair.turn()
        router.read()
    raise AssertionError(f"still open: {sorted(router.open)}")


def run_all(pair: EnginePair, requests: list[Request]) -> PairRouter:
    router = PairRouter(pair)
    for request in requests:
        router.start(request)
    run_turns(pair, router)
    return router


def make_group(name: str, n: int, **sampling: object) -> Request:
    settings = {"temperature": 0.9, "seed": 11, "max_tokens": 24, **sampling}
    return make_request(name, PROMPT[:41], sampling=SamplingParams(n=n, **settings))


PENALTIES = {"presence_penalty": 1.5, "frequency_penalty": 0.7, "repetition_penalty": 1.3}


@pytest.mark.parametrize(("prefill", "decode"), SHAPES)
def test_A13_A15_samples_with_penalties_equal_those_of_one_rank(
    folder: Path, prefill: tuple[int, int], decode: tuple[int, int]
) -> None:
    group = make_group("g", 4, **PENALTIES)
    expected = EnginePair(folder).run([group])
    assert len({tuple(ids) for ids in expected.values()}) == 4
    with ranked_pair(folder, prefill, decode) as pair:
        assert pair.run([group]) == expected
        counters = [engine.describe().counters for engine in (pair.prefill, pair.decode)]
        assert [one.prompt_tokens for one in counters] == [41, 0]
        assert counters[1].handoffs_completed == 1


@pytest.mark.parametrize(("prefill", "decode"), SHAPES)
def test_B5_A13_preempted_samples_change_no_token_on_ranks(
    folder: Path, prefill: tuple[int, int], decode: tuple[int, int]
) -> None:
    groups = [make_group(f"g{i}", 3, max_tokens=40, **PENALTIES) for i in range(2)]
    calm: dict[str, list[int]] = {}
    for group in groups:
        calm |= EnginePair(folder).run([group])
    with ranked_pair(folder, prefill, decode, decode_blocks=13) as pair:
        router = run_all(pair, groups)
        assert router.outputs == calm
        assert router.num_returned >= 2


@pytest.mark.parametrize("chunk_tokens", [37, 256])
@pytest.mark.parametrize(("prefill", "decode"), SHAPES)
def test_A14_prompt_logprobs_equal_those_of_one_rank_cold_and_warm(
    folder: Path, prefill: tuple[int, int], decode: tuple[int, int], chunk_tokens: int
) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=3, logprobs=3)
    alone = run_all(EnginePair(folder), [make_request("r", PROMPT, sampling=sampling)])
    assert len(alone.prompt_logprobs["r"]) == len(PROMPT) - 1
    with ranked_pair(folder, prefill, decode, max_num_batched_tokens=chunk_tokens) as pair:
        for name in ("cold", "warm"):
            found = run_all(pair, [make_request(name, PROMPT, sampling=sampling)])
            assert found.outputs[name] == alone.outputs["r"]
            assert found.prompt_logprobs[name] == alone.prompt_logprobs["r"]
            assert found.logprobs[name] == alone.logprobs["r"]


def test_A14_prompt_logprobs_of_a_group_beside_plain_requests_on_ranks(folder: Path) -> None:
    group = make_group("g", 3, prompt_logprobs=1)
    plain = [make_request(f"r{i}", PROMPT[i : 60 + i]) for i in range(4)]
    alone = EnginePair(folder)
    expected = run_all(alone, [group, *plain])
    with ranked_pair(folder, (2, 2), (1, 2), max_num_batched_tokens=64) as pair:
        found = run_all(pair, [group, *plain])
    assert found.outputs == expected.outputs
    assert found.prompt_logprobs == expected.prompt_logprobs
    assert len(found.prompt_logprobs["g#0"]) == 40


def test_a_local_prefill_on_ranks_gives_the_tokens_of_one_rank(folder: Path) -> None:
    group = make_group("g", 2, **PENALTIES, prompt_logprobs=0)
    expected = run_local(EnginePair(folder), group)
    with ranked_pair(folder, (1, 1), (2, 2)) as pair:
        assert run_local(pair, group) == expected
        assert pair.decode.describe().counters.local_prefill_tokens == 41


def run_local(pair: EnginePair, request: Request) -> dict[str, list[int]]:
    router = PairRouter(pair)
    router.adopt(request)
    pair.submit(request, is_local=True)
    run_turns(pair, router)
    return router.outputs


def steps_of(side: RankedSide) -> list[list[StepPlan]]:
    """What each stage computed, that of rank 0 first, in the order in which it did."""
    return [side.announced, *(follower.steps for follower in side.followers)]


def names_in(step: StepPlan) -> set[str]:
    return {part.request.request_id for part in step.slices}


def assert_alike(side: RankedSide) -> None:
    """Every rank computed the very steps that rank 0 decided on, in the same order."""
    leader, *others = ([PlanEncoder().encode(step) for step in steps] for steps in steps_of(side))
    assert leader
    assert all(steps == leader for steps in others)


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_B9_a_cancel_in_any_turn_reaches_all_stages_in_the_same_step(
    folder: Path, stages: int, side: str
) -> None:
    requests = [make_request(f"r{i}", PROMPT[i : 60 + i]) for i in range(4)]
    calm = EnginePair(folder).run(requests)
    num_cancelled_at_work = 0
    with ranked_pair(folder, (1, stages), (1, stages), max_num_batched_tokens=64) as pair:
        for turn in range(9):
            round_ = [
                replace(one, request_id=f"{one.request_id}.{turn}", handoff_id=f"h{i}.{turn}")
                for i, one in enumerate(requests)
            ]
            router = PairRouter(pair)
            for request in round_:
                router.start(request)
            for _ in range(turn):
                pair.turn()
                router.read()
            victim = round_[turn % 4]
            engine, ranks = (
                (pair.prefill, pair.prefill_side)
                if side == "prefill"
                else (pair.decode, pair.decode_side)
            )
            before = [len(steps) for steps in steps_of(ranks)]
            at_work = {name for step in ranks.announced[-stages:] for name in names_in(step)}
            num_cancelled_at_work += victim.request_id in at_work
            pair.cancel(pair.prefill, victim)
            pair.cancel(pair.decode, victim)
            assert engine.describe().ledger.sequences <= 3
            router.open.pop(victim.request_id, None)
            run_turns(pair, router)
            for steps, count in zip(steps_of(ranks), before, strict=True):
                assert not any(victim.request_id in names_in(step) for step in steps[count:])
            for request, original in zip(round_, requests, strict=True):
                if request is not victim:
                    assert router.outputs[request.request_id] == calm[original.request_id]
            pair.assert_ledger()
        assert_alike(pair.prefill_side)
        assert_alike(pair.decode_side)
    assert num_cancelled_at_work >= 2


@pytest.mark.parametrize("stages", [2, 4])
def test_B9_a_preemption_is_decided_once_and_all_stages_go_on_alike(
    folder: Path, stages: int
) -> None:
    sampling = SamplingParams(temperature=0.8, seed=3, max_tokens=48)
    requests = [
        make_request(f"p{i}", tuple(range(5 + i, 45 + i)), sampling=sampling) for i in range(8)
    ]
    calm = EnginePair(folder).run(requests)
    with ranked_pair(folder, (1, 1), (1, stages), decode_blocks=16) as pair:
        router = run_all(pair, requests)
        assert router.outputs == calm
        assert router.num_returned >= 2
        assert pair.decode.describe().counters.preemptions == router.num_returned
        assert_alike(pair.decode_side)


def draw_requests(count: int, *, num_tokens: int, seed: int = 3) -> list[Request]:
    numbers = random.Random(seed)
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens)
    return [
        make_request(
            f"r{i}",
            tuple(numbers.randrange(3, 380) for _ in range(numbers.randint(1, 60))),
            sampling=sampling,
        )
        for i in range(count)
    ]


CROWDED = {"max_num_seqs": 128, "prefill_blocks": 640, "decode_blocks": 896}


@pytest.mark.parametrize(
    ("prefill", "decode", "num_rounds"),
    [
        pytest.param((1, 2), (4, 1), 1, id="1x2-4x1"),
        *(
            pytest.param(*shape.values, 4, id=f"{shape.id}-long", marks=pytest.mark.soak)
            for shape in SHAPES
        ),
    ],
)
def test_A16_unlike_shapes_serve_128_requests_at_once(
    folder: Path, prefill: tuple[int, int], decode: tuple[int, int], num_rounds: int
) -> None:
    """In place of ten minutes, rounds of other prompts: all of a round are in flight at once."""
    with ranked_pair(folder, prefill, decode, **CROWDED) as pair:
        for seed in range(num_rounds):
            requests = draw_requests(128, num_tokens=8, seed=seed)
            expected = EnginePair(folder, **CROWDED).run(requests)
            router = run_all(pair, requests)
            assert router.outputs == expected
            assert router.num_returned == 0
            pair.assert_ledger()
        prefilled, decoded = (one.describe().counters for one in (pair.prefill, pair.decode))
        assert decoded.handoffs_completed == 128 * num_rounds
        assert (prefilled.handoffs_failed, decoded.handoffs_failed) == (0, 0)
        assert (decoded.recomputed_prompt_tokens, decoded.frames_rejected) == (0, 0)


def test_C5_two_tensor_ranks_decode_a_full_batch_while_kv_comes_all_the_time(folder: Path) -> None:
    """Sums between ranks and landing frames share both ranks' threads: no turn goes by without."""
    requests = draw_requests(48, num_tokens=24)
    calm = EnginePair(folder).run(requests)
    with ranked_pair(folder, (1, 1), (2, 1), max_num_seqs=4, max_num_batched_tokens=32) as pair:
        router, coming = PairRouter(pair), list(requests)
        num_busy_turns, num_before, bytes_before = 0, 0, 0
        while router.open or coming:
            while coming and pair.prefill.describe().ledger.sequences < 2:
                router.start(coming.pop(0))
            was_full = pair.decode.describe().load.num_running >= 4
            pair.turn()
            router.read()
            counters = pair.decode.describe().counters
            num_new = counters.generation_tokens - num_before
            num_before += num_new
            if was_full:
                assert num_new == 4, "a full batch makes a token for each at every turn"
                num_busy_turns += counters.handoff_bytes > bytes_before
            bytes_before = counters.handoff_bytes
        pair.settle()
        assert router.outputs == calm
        assert num_busy_turns >= 24, "KV came while the batch was full"
