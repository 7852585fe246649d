"""Frames that come in on the decode side: where they may go, and what a bad one ends."""

from dataclasses import replace

import pytest

from kv_transfer.decode_actions import AnswerCommit, Expect, RejectFrame, Start
from kv_transfer.decode_side import DecodeHandoffs
from kv_transfer.events import FrameLanded, LinkId
from kv_transfer.protocol import Grant, RefusalReason
from pdserve.request import Incarnation
from tests.unit.kv_transfer.decode_steps import (
    NUM_FRAMES,
    RESERVATION,
    STAGES,
    Setup,
    aborted,
    ask,
    be_committed,
    commit,
    placed,
    reason,
    receive_all,
    receive_some,
)
from tests.unit.kv_transfer.sides import MANIFEST, REQUEST, FakeReserver, envelope, landed


@pytest.mark.parametrize(
    "bad",
    [
        landed(1, is_intact=False),
        landed(1, num_bytes=17),
        landed(0),
        landed(NUM_FRAMES),
        landed(-1),
    ],
    ids=["checksum", "size", "duplicate", "beyond", "negative"],
)
def test_A9_one_bad_frame_fails_the_whole_handoff(
    decode: DecodeHandoffs, reserver: FakeReserver, bad: FrameLanded
) -> None:
    be_committed(decode)
    rejected, answer = decode.frame_landed(bad)
    assert isinstance(rejected, RejectFrame)
    aborted([answer])
    assert reserver.released == [RESERVATION]
    assert decode.counters.frames_rejected == 1
    aborted(commit(decode, call_id=6))


def test_A9_a_frame_of_another_worker_touches_nothing(decode: DecodeHandoffs) -> None:
    ask(decode)
    (rejected,) = decode.frame_landed(landed(0, link=LinkId(Incarnation(77), 1)))
    assert isinstance(rejected, RejectFrame)
    assert decode.num_reservations == 1


def test_frames_for_unknown_reservations_are_rejected(decode: DecodeHandoffs) -> None:
    (rejected,) = decode.frame_landed(landed(0, reservation=42))
    assert isinstance(rejected, RejectFrame)


@pytest.mark.parametrize("setup", STAGES)
def test_A10_blocks_stay_out_of_use_while_a_scatter_into_them_is_pending(
    decode: DecodeHandoffs, reserver: FakeReserver, setup: Setup
) -> None:
    if setup is receive_all:
        ask(decode)
        decode.frame_landed(landed(0))
    else:
        setup(decode)
        decode.frame_landed(landed(1))
    decode.abort(envelope(), "given up")
    assert reserver.released == []
    pending = 0 if setup is receive_all else 1
    assert reason(ask(decode, envelope(decode_attempt=2))) is RefusalReason.NO_ROOM
    assert decode.frame_scattered(RESERVATION, pending) == []
    assert reserver.released == [RESERVATION]
    assert isinstance(ask(decode, envelope(decode_attempt=3)), Grant)


def test_A10_late_frames_after_the_release_touch_no_block(
    decode: DecodeHandoffs, reserver: FakeReserver
) -> None:
    receive_some(decode)
    decode.abort(envelope(), "given up")
    assert reserver.released == [RESERVATION]
    assert isinstance(decode.frame_landed(landed(1))[0], RejectFrame)


def test_links_may_write_the_frames_of_a_new_reservation_but_not_twice(
    decode: DecodeHandoffs,
) -> None:
    expect, answer = decode.reserve(1, envelope(), REQUEST)
    assert isinstance(expect, Expect)
    assert expect.frames == MANIFEST.frames
    assert expect.peer == envelope().prefill_incarnation
    assert decode.reserve(2, envelope(), REQUEST) == [replace(answer, call_id=2)]


def test_a_hand_off_starts_when_its_last_frame_is_placed(decode: DecodeHandoffs) -> None:
    ask(decode)
    commit(decode)
    for index in range(NUM_FRAMES - 1):
        assert decode.frame_placed(placed(index)) == []
    start, acknowledged = decode.frame_placed(placed(NUM_FRAMES - 1))
    assert isinstance(start, Start)
    assert isinstance(acknowledged, AnswerCommit)


@pytest.mark.parametrize(
    "other", [{"is_intact": False}, {"num_bytes": 1}, {"frame_index": NUM_FRAMES}]
)
def test_a_placed_frame_with_a_fault_ends_its_hand_off_and_frees_the_blocks_at_once(
    decode: DecodeHandoffs, reserver: FakeReserver, other: dict[str, object]
) -> None:
    ask(decode)
    commit(decode)
    assert aborted(decode.frame_placed(placed(0, **other))).reason is RefusalReason.INCOMPATIBLE
    assert not reserver.held
    assert decode.counters.frames_rejected == 1
    assert decode.frame_placed(placed(1)) == [], "it came after the end"
