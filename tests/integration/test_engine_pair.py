"""TOK over both pools' engines: prefill -> decode equals colocated equals one process."""

import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from pdserve.config.worker import HandoffConfig
from pdserve.errors import LocalPrefillRefused, TooLong
from pdserve.request import Request, SamplingParams
from pdserve.rpc.codec import request_to_wire
from pdserve.rpc.v1 import rank_pb2, worker_pb2
from tests.support.engine_pair import TURN_S, EnginePair
from tests.support.engine_requests import make_request
from tests.support.pair_router import PairRouter
from tests.support.tiny_models import make_tiny_llama

LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 130, 300)
LONG_OUTPUT = SamplingParams(temperature=0.0, max_tokens=100)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"))


def make_requests(sampling: SamplingParams | None = None) -> list[Request]:
    numbers = random.Random(5)
    return [
        make_request(
            f"r{length}",
            tuple(numbers.randrange(3, 300) for _ in range(length)),
            sampling=sampling,
        )
        for length in LENGTHS
    ]


def run_alone(folder: Path, requests: list[Request]) -> dict[str, list[int]]:
    """The reference: each request by itself, prefilled and decoded by one engine."""
    outputs: dict[str, list[int]] = {}
    for request in requests:
        outputs |= run_colocated(EnginePair(folder), [request])
    return outputs


def run_colocated(pair: EnginePair, requests: list[Request]) -> dict[str, list[int]]:
    router = PairRouter(pair)
    for request in requests:
        router.adopt(request)
        pair.submit(request, is_local=True)
    for _ in range(4000):
        pair.turn()
        router.read()
        if not router.open:
            return router.outputs
    raise AssertionError("colocated run did not end")


@pytest.fixture(scope="module")
def reference(folder: Path) -> dict[str, list[int]]:
    return run_alone(folder, make_requests())


@pytest.fixture
def pair(folder: Path) -> Iterator[EnginePair]:
    made = EnginePair(folder)
    yield made
    made.assert_ledger()


@pytest.mark.parametrize("chunk_tokens", [16, 37, 64, 256])
def test_TOK_prefill_to_decode_equals_one_process_at_any_chunk_size(
    folder: Path, reference: dict[str, list[int]], chunk_tokens: int
) -> None:
    pair = EnginePair(folder, max_num_batched_tokens=chunk_tokens)
    assert pair.run(make_requests()) == reference
    pair.assert_ledger()


def test_TOK_colocated_equals_one_process(folder: Path, reference: dict[str, list[int]]) -> None:
    pair = EnginePair(folder)
    assert run_colocated(pair, make_requests()) == reference


def test_TOK_a_cached_prefix_changes_no_token_and_ships_less(
    folder: Path, reference: dict[str, list[int]], pair: EnginePair
) -> None:
    assert pair.run(make_requests()) == reference
    cold_bytes = pair.links.bytes_sent
    again = [
        make_request(f"{request.request_id}-again", request.token_ids)
        for request in make_requests()
    ]
    outputs = pair.run(again)
    assert {name.removesuffix("-again"): ids for name, ids in outputs.items()} == reference
    # Only tokens of last, partly filled blocks travel: all full ones are cached on decode.
    token_bytes = cold_bytes // sum(LENGTHS)
    partial = sum(length % 16 for length in LENGTHS)
    assert pair.links.bytes_sent - cold_bytes == partial * token_bytes


def test_NO_RECOMPUTE_decode_computes_no_prompt_token_of_a_handed_off_request(
    pair: EnginePair,
) -> None:
    pair.run(make_requests())
    counters = pair.decode.describe().counters
    assert counters.recomputed_prompt_tokens == 0
    assert counters.handoffs_completed == len(LENGTHS)


def test_TOK_seeded_sampling_gives_the_same_ids_in_both_modes(folder: Path) -> None:
    sampling = SamplingParams(temperature=0.9, top_p=0.95, top_k=50, seed=77, max_tokens=24)
    requests = make_requests(sampling)
    pair = EnginePair(folder)
    outputs = pair.run(requests)
    assert outputs == run_colocated(EnginePair(folder), requests)
    assert len({tuple(ids) for ids in outputs.values()}) == len(requests)
    pair.assert_ledger()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_B5_forced_preemption_changes_no_token(folder: Path, temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature, seed=3, max_tokens=48)
    requests = [
        make_request(f"p{i}", tuple(range(5 + i, 45 + i)), sampling=sampling) for i in range(8)
    ]
    calm = EnginePair(folder).run(requests)
    tight = EnginePair(folder, decode_blocks=16)
    router = PairRouter(tight)
    for request in requests:
        router.start(request)
    for _ in range(4000):
        tight.turn()
        router.read()
        if not router.open:
            break
    tight.settle()
    assert router.outputs == calm
    assert router.num_returned >= 3
    assert tight.decode.describe().counters.preemptions == router.num_returned
    tight.assert_ledger()


def test_A11_a_corrupted_frame_changes_the_output_so_the_shipped_KV_is_the_one_in_use(
    folder: Path, reference: dict[str, list[int]]
) -> None:
    pair = EnginePair(folder)

    def spoil(payload: torch.Tensor) -> None:
        payload.view(torch.float32).mul_(-3.0)

    pair.links.corrupt = spoil
    outputs = pair.run(make_requests())
    assert all(outputs[name][0] == reference[name][0] for name in reference)
    assert sum(outputs[name] != reference[name] for name in reference) >= len(reference) // 2


def test_local_prefill_is_refused_by_name_when_it_is_switched_off(folder: Path) -> None:
    pair = EnginePair(folder, max_local_prefill_tokens=0)
    pair.submit(make_request("r", (5, 6, 7)), is_local=True)
    (answer,) = [message.reply for message in pair.decode_outbox.sent]
    assert answer.error.reason == LocalPrefillRefused.__name__


def test_a_request_that_ends_with_its_first_token_ships_nothing_to_a_running_batch(
    pair: EnginePair,
) -> None:
    request = make_request("r", tuple(range(9, 40)), sampling=SamplingParams(max_tokens=1))
    outputs = pair.run([request])
    assert len(outputs["r"]) == 1
    assert pair.decode.describe().counters.handoffs_completed == 0


@pytest.mark.parametrize("turns", range(12))
@pytest.mark.parametrize("side", ["prefill", "decode", "both"])
def test_A1_A6_a_cancel_at_any_moment_gives_every_block_back(
    folder: Path, turns: int, side: str
) -> None:
    pair = EnginePair(
        folder, max_num_batched_tokens=64, handoff=HandoffConfig(frame_tokens=64, lease_s=0.2)
    )
    request = make_request("r", tuple(range(3, 283)))
    pair.submit(request)
    for _ in range(turns):
        pair.turn()
    if side != "decode":
        pair.cancel(pair.prefill, request)
    if side != "prefill":
        pair.cancel(pair.decode, request)
    for _ in range(60):
        pair.turn()
    pair.assert_ledger()


def test_A2_prompts_that_decode_can_never_hold_leave_no_block_on_prefill(folder: Path) -> None:
    """200 of them, ten at a time; a request that both can hold is served among them."""
    pair = EnginePair(folder, prefill_blocks=128, decode_blocks=8)
    router = PairRouter(pair)
    router.start(make_request("fits", tuple(range(3, 90))))
    num_turns = 0
    for first in range(0, 200, 10):
        names = {f"large{number}" for number in range(first, first + 10)}
        for name in sorted(names):
            pair.submit(make_request(name, tuple(range(5 + first, 5 + first + 150))))
        while names:
            num_turns += 1
            assert num_turns * TURN_S <= 20 * 1.0, "each ten take less than 1 s of the pair's clock"
            pair.turn()
            updates = pair.prefill_outbox.updates
            refused = {one.request_id: one.failed for one in updates if one.HasField("failed")}
            assert all(failed.reason == TooLong.reason for failed in refused.values())
            names -= refused.keys()
            pair.prefill_outbox.updates = [one for one in updates if one.request_id == "fits"]
            router.read()
    pair.settle()
    pair.assert_ledger()
    assert pair.decode.describe().counters.handoffs_refused == 200
    assert len(router.outputs["fits"]) == 16


def test_B6_a_long_preempted_sequence_costs_the_others_no_step(folder: Path) -> None:
    """Decode computes no token of its prompt again, and the others get a token at every turn."""
    short = [
        make_request(f"s{i}", tuple(range(5 + i, 21 + i)), sampling=LONG_OUTPUT) for i in (0, 1)
    ]
    long = make_request("long", tuple(7 + i % 300 for i in range(1500)), sampling=LONG_OUTPUT)
    calm = EnginePair(folder, prefill_blocks=300, decode_blocks=300).run([*short, long])
    pair = EnginePair(folder, prefill_blocks=300, decode_blocks=108)
    router = PairRouter(pair)
    for request in (*short, long):
        router.start(request)
    counts: list[list[int]] = []
    attempts = {1}
    while router.open:
        pair.turn()
        router.read()
        attempts.add(router.open["long"].attempt if "long" in router.open else 1)
        counts.append([len(router.outputs[one.request_id]) for one in short])
    assert len(attempts) > 1, "it was never preempted"
    assert router.outputs == calm
    counters = pair.decode.describe().counters
    assert (counters.recomputed_prompt_tokens, counters.local_prefill_tokens) == (0, 0)
    assert pair.prefill.describe().counters.prompt_tokens > 1500 + 32
    for of_one in zip(*counts, strict=True):
        running = [count for count in of_one if 2 <= count < LONG_OUTPUT.max_tokens]
        assert all(after == before + 1 for before, after in pairwise(running))
    pair.settle()
    pair.assert_ledger()


def test_B3_two_full_pools_make_progress_again(folder: Path) -> None:
    pair = EnginePair(folder, prefill_blocks=24, decode_blocks=24)
    requests = [make_request(f"q{i}", tuple(range(3 + i, 120 + i))) for i in range(12)]
    calm = EnginePair(folder).run(requests)
    assert pair.run(requests, max_turns=20_000) == calm
    pair.assert_ledger()


def test_A11_a_submit_that_lost_its_handoff_is_served_and_counted_as_recomputed(
    folder: Path, reference: dict[str, list[int]]
) -> None:
    pair = EnginePair(folder)
    request = next(one for one in make_requests() if one.request_id == "r130")
    router = PairRouter(pair)
    router.adopt(request)
    lost = worker_pb2.SubmitRequest(request=request_to_wire(request))
    pair.decode.handle(rank_pb2.ToRank(call_id=1, submit=lost))
    for _ in range(100):
        pair.turn()
        router.read()
    assert router.outputs["r130"] == reference["r130"]
    counters = pair.decode.describe().counters
    assert (counters.recomputed_prompt_tokens, counters.local_prefill_tokens) == (130, 0)


def test_TOK_a_follow_up_turn_prefilled_on_decode_gives_the_same_tokens(folder: Path) -> None:
    pair = EnginePair(folder)
    first = make_request("turn-1", tuple(range(3, 150)))
    output = pair.run([first])["turn-1"]
    follow_up = make_request("turn-2", (*first.token_ids, *output, 7, 8, 9))
    assert run_colocated(pair, [follow_up]) == run_alone(folder, [follow_up])
    counters = pair.decode.describe().counters
    # Prompt and output of the first turn are cached on decode, but for the last, open block.
    assert 0 < counters.local_prefill_tokens <= 32
    assert counters.recomputed_prompt_tokens == 0
    pair.settle()
    pair.assert_ledger()


def test_a_local_prefill_over_its_bound_is_refused_by_name(folder: Path) -> None:
    pair = EnginePair(folder)
    message = worker_pb2.SubmitRequest(request=request_to_wire(make_request("r", (5,) * 40)))
    message.local_prefill.max_tokens = 39
    pair.decode.handle(rank_pb2.ToRank(call_id=1, submit=message))
    (answer,) = [message.reply for message in pair.decode_outbox.sent]
    assert answer.error.reason == LocalPrefillRefused.__name__
    pair.assert_ledger()


def test_a_place_for_a_request_that_is_gone_is_refused_and_harms_nobody(folder: Path) -> None:
    pair = EnginePair(folder)
    gone, other = make_request("gone", (5, 6, 7)), make_request("other", (8, 9, 10))
    router = PairRouter(pair)
    router.start(other)
    pair.submit(gone)
    pair.cancel(pair.prefill, gone)
    pair.prefill_outbox.sent.clear()
    pair.place(gone)
    (answer,) = pair.prefill_outbox.sent
    assert answer.reply.error.reason == "WorkerLost"
    for _ in range(200):
        pair.turn()
        router.read()
    assert router.open == {}
    assert len(router.outputs["other"]) == 16


def test_token_1_and_the_commit_leave_before_the_last_frames_are_packed(folder: Path) -> None:
    pair = EnginePair(folder, max_num_batched_tokens=64)
    # Three chunks: the reservation is there before the last of them.
    (request,) = [one for one in make_requests() if len(one.token_ids) == 130]
    pair.run([request])
    last = pair.prefill_log.index("call commit")
    assert pair.prefill_log[:last] == ["call reserve", "push 0", "push 1", "flush"]
    assert pair.prefill_log[last:] == ["call commit", "push 2"]
    pair.assert_ledger()


def test_TOK_a_sequence_that_starts_on_told_tokens_goes_on_when_its_commit_is_late(
    folder: Path, reference: dict[str, list[int]]
) -> None:
    pair = EnginePair(folder)
    (request,) = [one for one in make_requests() if len(one.token_ids) == 130]
    router = PairRouter(pair)
    pair.may_commit = False
    router.start(request)
    for _ in range(6):
        pair.turn()
        while pair.links.told:
            pair.decode.handle(pair.links.told.popleft())
    router.read()
    assert pair.decode.describe().load.num_running == 1
    pair.may_commit = True
    while router.open:
        pair.turn()
        router.read()
    pair.settle()
    assert router.outputs[request.request_id] == reference[request.request_id]
    pair.assert_ledger()


def test_an_answer_to_a_call_of_the_other_role_is_nobody_s(pair: EnginePair) -> None:
    """A rank changes its pool while a peer still owes it an answer."""
    stale = rank_pb2.ToRank(call_id=7, peer_reply=rank_pb2.PeerReply())
    pair.decode.handle(stale)
    pair.prefill.handle(stale)
    requests = make_requests()[:3]
    assert pair.run(requests) == run_alone(Path(pair.config.model), requests)
