"""Both pools' engines with two steps in flight: the tokens, ledgers and usage of one in flight."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pdserve.config.worker import HandoffConfig
from pdserve.request import Request, SamplingParams
from pdserve.rpc.v1 import rank_pb2
from tests.support.engine_pair import TURN_S, EnginePair
from tests.support.engine_requests import make_request
from tests.support.pair_router import PairRouter
from tests.support.tiny_models import make_tiny_llama

LENGTHS = (1, 15, 16, 17, 33, 64, 65, 130)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"))


def make_requests(**sampling: object) -> list[Request]:
    numbers = random.Random(5)
    return [
        make_request(
            f"r{length}",
            tuple(numbers.randrange(3, 300) for _ in range(length)),
            sampling=SamplingParams(**({"temperature": 0.0, "max_tokens": 12} | sampling)),
        )
        for length in LENGTHS
    ]


def overlapped(folder: Path, **options: object) -> EnginePair:
    return EnginePair(folder, is_overlapped=True, **options)


def num_awaited(pair: EnginePair) -> int:
    return sum(runner.num_awaited for runner in pair.late_runners)


@pytest.fixture
def pair(folder: Path) -> Iterator[EnginePair]:
    made = overlapped(folder)
    yield made
    made.settle()
    made.assert_ledger()


@pytest.mark.parametrize("chunk_tokens", [37, 64, 256])
def test_TOK_two_steps_in_flight_change_no_token(folder: Path, chunk_tokens: int) -> None:
    expected = EnginePair(folder).run(make_requests())
    pair = overlapped(folder, max_num_batched_tokens=chunk_tokens)
    assert pair.run(make_requests()) == expected
    assert num_awaited(pair) > 20
    # The prefixes are cached by now, on both sides.
    assert (
        pair.run([make_request("again", make_requests()[-1].token_ids)])["again"][:12]
        == (expected[f"r{LENGTHS[-1]}"])
    )
    pair.assert_ledger()


def test_TOK_colocated_with_two_steps_in_flight_changes_no_token(folder: Path) -> None:
    expected = EnginePair(folder).run(make_requests())
    pair = overlapped(folder)
    router = PairRouter(pair)
    for request in make_requests():
        router.adopt(request)
        pair.submit(request, is_local=True)
    while router.open:
        pair.turn()
        router.read()
    assert router.outputs == expected
    pair.settle()
    pair.assert_ledger()


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.9, "seed": 7, "top_p": 0.9},
        {"temperature": 0.9, "seed": 7, "frequency_penalty": 0.7},
        {"logprobs": 2},
        {"prompt_logprobs": 1},
        {"n": 3, "temperature": 0.9, "seed": 7},
    ],
)
def test_TOK_every_kind_of_sampling_gives_its_own_tokens(
    folder: Path, sampling: dict[str, object], pair: EnginePair
) -> None:
    calm = PairRouter(EnginePair(folder))
    late = PairRouter(pair)
    for router in (calm, late):
        for request in make_requests(**sampling):
            router.start(request)
        for _ in range(3000):
            router._pair.turn()
            router.read()
            if not router.open:
                break
    assert late.outputs == calm.outputs
    assert late.logprobs == calm.logprobs
    assert late.prompt_logprobs == calm.prompt_logprobs


def test_B5_preemption_with_steps_in_flight_changes_no_token(folder: Path) -> None:
    sampling = SamplingParams(temperature=0.8, seed=3, max_tokens=48)
    requests = [
        make_request(f"p{i}", tuple(range(5 + i, 45 + i)), sampling=sampling) for i in range(8)
    ]
    calm = EnginePair(folder).run(requests)
    tight = overlapped(folder, decode_blocks=16)
    router = PairRouter(tight)
    for request in requests:
        router.start(request)
    for _ in range(20_000):
        tight.turn()
        router.read()
        if not router.open:
            break
    assert router.outputs == calm
    assert router.num_returned >= 1
    tight.settle()
    tight.assert_ledger()


def test_C12_a_stop_token_ends_the_stream_and_its_successor_is_nowhere(
    folder: Path, pair: EnginePair
) -> None:
    plain = make_requests()[3]
    expected = EnginePair(folder).run([plain])[plain.request_id]
    stop = next(token for token in expected[4:] if expected.index(token) >= 4)
    end = expected.index(stop) + 1
    sampling = SamplingParams(temperature=0.0, max_tokens=40, stop_token_ids=(stop,))
    stopped = make_request("s", plain.token_ids, sampling=sampling)
    pair.submit(stopped)
    for _ in range(60):
        pair.turn()
    updates = [u for u in pair.decode_outbox.updates if u.request_id == "s"]
    tokens = [token for update in updates for token in update.token_ids]
    assert tokens == expected[1:end]
    assert [u.WhichOneof("outcome") for u in updates][-1] == "finished"
    assert updates[-1].finished.stop_token_id == stop
    assert pair.decode.describe().counters.generation_tokens == end - 1


@pytest.mark.parametrize("turns", range(12))
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_A6_a_cancel_at_any_turn_stops_the_stream_and_gives_every_block_back(
    folder: Path, turns: int, side: str
) -> None:
    pair = overlapped(
        folder, max_num_batched_tokens=64, handoff=HandoffConfig(frame_tokens=64, lease_s=0.2)
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=64, prompt_logprobs=0)
    request = make_request("a", tuple(range(3, 250)), sampling=sampling)
    pair.submit(request)
    for _ in range(turns):
        pair.turn()
    engines = {"prefill": pair.prefill, "decode": pair.decode}
    outboxes = {"prefill": pair.prefill_outbox, "decode": pair.decode_outbox}
    pair.cancel(engines[side], request)
    num_updates = len(outboxes[side].updates)
    for _ in range(5):
        pair.turn()
    assert len(outboxes[side].updates) == num_updates
    for engine in engines.values():
        pair.cancel(engine, request)
    for _ in range(100):
        pair.turn()
    pair.assert_ledger()


def test_a_deadline_that_passes_with_a_step_in_flight_ends_the_stream(
    folder: Path, pair: EnginePair
) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=400)
    request = make_request("d", tuple(range(3, 30)), sampling=sampling)
    pair.submit(replace(request, deadline_s=4.5 * TURN_S), is_local=True)
    for _ in range(10):
        pair.turn()
    outcomes = [update.WhichOneof("outcome") for update in pair.decode_outbox.updates]
    assert outcomes.count("failed") == 1
    assert outcomes[-1] == "failed"
    assert len(outcomes) > 1
    assert pair.decode.describe().ledger.sequences == 0


def test_a_drained_worker_says_so_only_when_nothing_is_in_flight(
    folder: Path, pair: EnginePair
) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=400)
    for side, engine in (("prefill", pair.prefill), ("decode", pair.decode)):
        request = make_request(side, tuple(range(3, 380)), sampling=sampling)
        pair.submit(request, is_local=side == "decode")
        engine.step()
        pair.cancel(engine, request)
        engine.handle(rank_pb2.ToRank(call_id=5, drain=rank_pb2.Drain()))
        assert not engine.describe().is_drained
        while engine.step():
            pass
        pair.exchange()
        assert engine.describe().is_drained


def test_scores_of_a_prompt_cancelled_in_flight_are_not_told(
    folder: Path, pair: EnginePair
) -> None:
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=0)
    request = make_request("a", tuple(range(3, 380)), sampling=sampling)
    pair.submit(request, is_local=True)
    pair.turn()
    scored = sum(len(one.prompt_logprobs.logprobs) for one in pair.decode_outbox.updates)
    assert 0 < scored < 376, "the second chunk is in flight"
    pair.cancel(pair.decode, request)
    num_updates = len(pair.decode_outbox.updates)
    for _ in range(3):
        pair.turn()
    assert len(pair.decode_outbox.updates) == num_updates
