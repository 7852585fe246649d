"""Both pools' engines where frames leave before their step has ended, and links wait for it."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pdserve.config.worker import HandoffConfig
from pdserve.request import Request, SamplingParams
from tests.support.engine_pair import EnginePair
from tests.support.engine_requests import make_request
from tests.support.random_pair import compare, expect_alone, make_visits, visit
from tests.support.tiny_models import make_tiny_llama

LAYERED = HandoffConfig(frame_tokens=32, frame_layers=1, layered_from_tokens=40)
LENGTHS = (3, 39, 40, 64, 130, 200)
NUM_LAYERS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"))


def make_requests(max_tokens: int = 6) -> list[Request]:
    numbers = random.Random(5)
    return [
        make_request(
            f"r{length}",
            tuple(numbers.randrange(3, 300) for _ in range(length)),
            sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
        )
        for length in LENGTHS
    ]


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[int]]:
    return EnginePair(folder).run(make_requests())


def num_frames(length: int, frame_tokens: int = 32) -> int:
    stretches = -(-length // frame_tokens)
    return stretches * (NUM_LAYERS if length >= LAYERED.layered_from_tokens else 1)


@pytest.mark.parametrize("chunk_tokens", [48, 256])
@pytest.mark.parametrize("is_marked", [False, True])
def test_TOK_groups_of_layers_change_no_token(
    folder: Path, expected: dict[str, list[int]], is_marked: bool, chunk_tokens: int
) -> None:
    pair = EnginePair(
        folder, is_marked=is_marked, handoff=LAYERED, max_num_batched_tokens=chunk_tokens
    )
    assert pair.run(make_requests()) == expected
    pushes = [entry for entry in pair.prefill_log if entry.startswith("push")]
    assert len(pushes) == sum(num_frames(length) for length in LENGTHS)
    assert pair.links.num_awaited == (len(pushes) if is_marked else 0)
    pair.assert_ledger()


def test_frames_go_out_as_their_step_is_launched_and_land_before_it_has_ended(
    folder: Path,
) -> None:
    pair = EnginePair(folder, is_marked=True, handoff=LAYERED)
    (request,) = (one for one in make_requests() if one.request_id == "r64")
    pair.submit(request)
    pair.prefill.step()
    pair.exchange()
    assert len(pair.links.in_flight) == num_frames(64), "the grant came after the launch"
    assert not pair.links.has_next
    assert pair.prefill.describe().ledger.leases == 1
    assert pair.prefill.awaited is not None
    pair.prefill.awaited.wait()
    assert not pair.links.in_flight
    assert "call commit" not in pair.prefill_log
    pair.prefill.step()
    assert pair.prefill_log[-1] == "call commit"
    pair.settle()
    assert pair.decode.describe().counters.handoffs_completed == 1


def test_the_first_layers_of_all_prompts_of_a_step_go_before_the_last_of_any(
    folder: Path,
) -> None:
    pair = EnginePair(folder, is_marked=True, handoff=LAYERED, max_num_batched_tokens=128)
    for number in range(6):
        prompt = tuple(range(3 + 20 * number, 67 + 20 * number))
        pair.submit(make_request(f"r{number}", prompt))
    pair.prefill.step()
    pair.exchange()
    assert pair.prefill.awaited is not None
    pair.prefill.awaited.wait()
    assert pair.prefill.step()
    pair.prefill_log.clear()
    pair.prefill.step()
    pushes = [entry for entry in pair.prefill_log if entry.startswith("push")]
    assert pushes == [f"push {index}" for index in (0, 2, 0, 2, 1, 3, 1, 3)]
    for _ in range(60):
        pair.turn()
    assert pair.decode.describe().counters.handoffs_completed == 6
    pair.assert_ledger()


def test_a_cached_prefix_waits_for_no_step(folder: Path) -> None:
    pair = EnginePair(folder, is_marked=True, handoff=LAYERED, decode_blocks=16)
    first = make_request("a", tuple(range(3, 83)), sampling=SamplingParams(max_tokens=1))
    pair.run([first])
    pair.prefill_log.clear()
    pair.may_deliver = False
    pair.submit(make_request("b", tuple(range(3, 83))))
    pair.prefill.step()
    pair.exchange()
    assert pair.prefill.describe().counters.prefix_cache_hits == 64
    awaited = [frame.after is not None for frame in pair.links.in_flight]
    assert awaited == [False] * 2 * NUM_LAYERS + [True] * NUM_LAYERS
    pair.may_deliver = True
    pair.settle()


def cancel(pair: EnginePair, request: Request) -> None:
    pair.cancel(pair.prefill, request)


def lose_decode(pair: EnginePair, request: Request) -> None:
    pair.cancel(pair.decode, request)


@pytest.mark.parametrize("end", [cancel, lose_decode])
@pytest.mark.parametrize("is_computed", [False, True])
def test_A6_A10_what_ends_in_the_middle_of_a_step_is_never_committed(
    folder: Path, end: Callable[[EnginePair, Request], None], is_computed: bool
) -> None:
    pair = EnginePair(folder, is_marked=True, handoff=LAYERED)
    (request,) = (one for one in make_requests() if one.request_id == "r130")
    pair.submit(request)
    pair.prefill.step()
    pair.exchange()
    assert len(pair.links.in_flight) == num_frames(130)
    if is_computed:
        assert pair.prefill.awaited is not None
        pair.prefill.awaited.wait()
    end(pair, request)
    pair.settle()
    assert not pair.links.in_flight
    assert pair.decode.describe().counters.handoffs_completed == 0
    pair.assert_ledger()


@pytest.mark.soak
def test_LEDGER_random_visits_whose_frames_leave_early_give_the_tokens_of_a_fresh_engine(
    folder: Path,
) -> None:
    visits = make_visits(6, 14, 384, max_prompt=90, max_tokens=12, turns=12)
    pair = EnginePair(
        folder,
        prefill_blocks=24,
        decode_blocks=14,
        handoff=HandoffConfig(frame_tokens=32, frame_layers=1, layered_from_tokens=40, lease_s=0.2),
        is_marked=True,
        max_num_seqs=8,
        max_num_batched_tokens=64,
    )
    assert pair.marked is not None
    numbers = random.Random(6)

    def exchange_or_not() -> None:
        pair.may_deliver = numbers.random() < 0.7
        pair.exchange()
        pair.may_deliver = True

    pair.marked.on_computed = exchange_or_not
    router = visit(pair, visits)
    assert compare(router, visits, expect_alone(EnginePair(folder), visits)) >= 10
    assert pair.links.num_awaited > 5
