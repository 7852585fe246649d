"""The oracles must fail when they should: a lenient one would pass everything."""

import os

import pytest

from launcher.client import Generation, SampleOutput
from pdserve.rpc.v1 import inference_pb2, types_pb2
from tests.support.oracles import (
    Resources,
    assert_not_recomputed,
    assert_one_end,
    assert_same_tokens,
    ledger_faults,
)


def finished(ids: list[int], *, sequences: list[int] | None = None) -> Generation:
    finish = inference_pb2.SampleFinish(finish_reason=types_pb2.FINISH_REASON_LENGTH, num_tokens=2)
    return Generation(
        token_ids=ids,
        text="x" * len(ids),
        samples={0: SampleOutput(token_ids=ids, text="x" * len(ids), finish=finish)},
        sequences=[0, 1] if sequences is None else sequences,
        finish=finish,
        usage=types_pb2.Usage(completion_tokens=2),
        timeline=types_pb2.Timeline(kv_blocks_shipped=3),
    )


def worker(**ledger: int) -> inference_pb2.WorkerInfo:
    fields = {"total_blocks": 10, "free_blocks": 7, "cached_blocks": 3, **ledger}
    return inference_pb2.WorkerInfo(worker_id="d", ledger=types_pb2.Ledger(**fields))


def test_equal_runs_pass() -> None:
    assert_same_tokens(finished([1, 2]), finished([1, 2]))
    assert_one_end(finished([1, 2]))
    assert_not_recomputed(finished([1, 2]))


def test_one_other_token_fails_tok() -> None:
    with pytest.raises(AssertionError):
        assert_same_tokens(finished([1, 2]), finished([1, 3]))


@pytest.mark.parametrize("sequences", [[0, 2], [0, 0], [1, 2]])
def test_gap_or_double_fails_one_end(sequences: list[int]) -> None:
    with pytest.raises(AssertionError):
        assert_one_end(finished([1, 2], sequences=sequences))


def test_missing_end_and_missing_token_fail_one_end() -> None:
    with pytest.raises(AssertionError):
        assert_one_end(Generation(sequences=[0]))
    with pytest.raises(AssertionError):
        assert_one_end(finished([1]))


def test_A11_recomputed_or_unshipped_prompt_fails() -> None:
    for timeline in (
        types_pb2.Timeline(kv_blocks_shipped=0),
        types_pb2.Timeline(kv_blocks_shipped=3, recomputed_tokens=17),
    ):
        generation = finished([1, 2])
        generation.timeline = timeline
        with pytest.raises(AssertionError):
            assert_not_recomputed(generation)


def test_ledger_at_rest_has_no_faults() -> None:
    assert ledger_faults([worker()]) == []


@pytest.mark.parametrize(
    "ledger",
    [
        {"free_blocks": 6},
        {"total_blocks": 0, "free_blocks": 0, "cached_blocks": 0},
        {"sequences": 1},
        {"reservations": 1},
        {"leases": 1},
        {"transfers": 1},
        {"held_handoffs": 1},
    ],
)
def test_anything_left_is_a_ledger_fault(ledger: dict[str, int]) -> None:
    assert len(ledger_faults([worker(), worker(**ledger)])) == 1


def test_leaked_descriptor_fails_bound() -> None:
    before = Resources.of([os.getpid()])
    # Of other tests in this process, some may be closed meanwhile.
    leaked = [os.open("/dev/null", os.O_RDONLY) for _ in range(50)]
    try:
        after = Resources.of([os.getpid()])
    finally:
        for descriptor in leaked:
            os.close(descriptor)
    with pytest.raises(AssertionError):
        after.assert_no_growth(before, rss_bytes=1 << 30, num_fds=0, num_threads=100)
