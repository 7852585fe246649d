"""TOK where links read frames out of the blocks long after the engine has shipped them."""

import random
from pathlib import Path

import pytest
import torch

from pdserve.config.worker import HandoffConfig
from pdserve.request import Request
from tests.support.engine_pair import EnginePair
from tests.support.engine_requests import make_request
from tests.support.pair_router import PairRouter
from tests.support.tiny_models import make_tiny_llama

HANDOFF = HandoffConfig(frame_tokens=32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"))


def make_requests(count: int, seed: int) -> list[Request]:
    numbers = random.Random(seed)
    return [
        make_request(
            f"r{index}", tuple(numbers.randrange(3, 300) for _ in range(numbers.randrange(20, 120)))
        )
        for index in range(count)
    ]


def run_slowly(pair: EnginePair, requests: list[Request], seed: int) -> dict[str, list[int]]:
    """Frames move in some turns only; a full prefill pool waits for them."""
    numbers, router = random.Random(seed), PairRouter(pair)
    for request in requests:
        router.start(request)
    for _ in range(4000):
        pair.may_deliver = numbers.random() < 0.3
        pair.turn()
        router.read()
        if not router.open:
            pair.may_deliver = True
            pair.settle()
            return router.outputs
    raise AssertionError(sorted(router.open))


@pytest.mark.parametrize("seed", [1, 2])
def test_TOK_late_reading_finds_what_was_computed(folder: Path, seed: int) -> None:
    requests = make_requests(12, seed)
    expected = EnginePair(folder).run(requests)
    pair = EnginePair(folder, prefill_blocks=20, handoff=HANDOFF, reads_blocks=True)
    assert run_slowly(pair, requests, seed) == expected
    pair.assert_ledger()


def test_A10_a_cancelled_request_s_blocks_are_reused_and_nobody_reads_them_late(
    folder: Path,
) -> None:
    requests = make_requests(12, 3)
    expected = EnginePair(folder).run(requests[1::2])
    pair = EnginePair(folder, prefill_blocks=20, handoff=HANDOFF, reads_blocks=True)
    router, numbers = PairRouter(pair), random.Random(4)
    for request in requests:
        pair.submit(request)
    for request in requests[1::2]:
        router.adopt(request)
    cancelled = list(requests[::2])
    for _ in range(4000):
        pair.may_deliver = numbers.random() < 0.3
        pair.turn()
        if cancelled and numbers.random() < 0.5:
            request = cancelled.pop(0)
            # Whatever waits in its blocks must be gone before they are another's.
            pair.cancel(pair.prefill, request)
            pair.cancel(pair.decode, request)
        router.read()
        if not router.open and not cancelled:
            break
    pair.may_deliver = True
    pair.settle()
    assert router.outputs == expected
    pair.assert_ledger()


@pytest.mark.parametrize("reads_blocks", [False, True])
def test_fp8_frames_carry_a_hand_off_at_a_third_of_float32_s_bytes(
    folder: Path, reads_blocks: bool
) -> None:
    requests = make_requests(6, 5)
    plain = EnginePair(folder, handoff=HANDOFF)
    plain.run(requests)
    handoff = HandoffConfig(frame_tokens=32, wire_dtype="fp8")
    pair = EnginePair(folder, handoff=handoff, reads_blocks=reads_blocks)
    outputs = pair.run(requests)
    assert all(len(ids) == 16 for ids in outputs.values())
    head_dim = 16
    expected = plain.links.bytes_sent * (head_dim + 4) // (4 * head_dim)
    assert pair.links.bytes_sent == expected
    assert pair.decode.describe().counters.frames_rejected == 0
    pair.assert_ledger()
