"""First tokens that a link tells ahead of their commit."""

from dataclasses import replace

import pytest

from kv_transfer import codec
from kv_transfer.decode_actions import AnswerCommit, DecodeAction, Start
from kv_transfer.decode_side import DecodeHandoffs
from kv_transfer.events import LinkId, TokensTold
from kv_transfer.protocol import Acknowledged, FirstToken, HandoffAborted, SampledAhead
from pdserve.request import Incarnation, ReservationId
from pdserve.rpc.v1 import link_pb2
from pdserve.timeline import ManualClock
from tests.unit.kv_transfer.sides import (
    LINK,
    MANIFEST,
    REQUEST,
    TOKEN,
    FakeReserver,
    envelope,
    landed,
    make_decode,
)

WORDS = SampledAhead(
    reservation_id=ReservationId(b"res1"),
    first_tokens=(TOKEN,),
    manifest_digest=MANIFEST.digest,
)


@pytest.fixture
def decode() -> DecodeHandoffs:
    made = make_decode(ManualClock(1000.0), FakeReserver())
    made.reserve(1, envelope(), REQUEST)
    return made


def tell(
    decode: DecodeHandoffs, words: SampledAhead = WORDS, link: LinkId = LINK
) -> list[DecodeAction]:
    return decode.tokens_told(TokensTold(link=link, words=words))


def land_all(decode: DecodeHandoffs) -> list[DecodeAction]:
    actions: list[DecodeAction] = []
    for frame in MANIFEST.frames:
        decode.frame_landed(landed(frame.index))
        actions += decode.frame_scattered(ReservationId(b"res1"), frame.index)
    return actions


def commit(decode: DecodeHandoffs, token: FirstToken = TOKEN) -> list[DecodeAction]:
    return decode.commit(5, envelope(reservation=1), (token,), MANIFEST.digest)


def test_a_sequence_starts_on_them_and_its_commit_is_acknowledged_later(
    decode: DecodeHandoffs,
) -> None:
    assert tell(decode) == []
    (start,) = land_all(decode)
    assert isinstance(start, Start)
    assert start.first_tokens == (TOKEN,)
    assert commit(decode) == [AnswerCommit(call_id=5, answer=Acknowledged())]


def test_they_start_a_sequence_whose_frames_are_all_there(decode: DecodeHandoffs) -> None:
    assert land_all(decode) == []
    (start,) = tell(decode)
    assert isinstance(start, Start)


def test_behind_the_commit_they_change_nothing(decode: DecodeHandoffs) -> None:
    commit(decode)
    assert tell(decode, replace(WORDS, first_tokens=(replace(TOKEN, token_id=9),))) == []
    start, answer = land_all(decode)
    assert isinstance(start, Start)
    assert start.first_tokens == (TOKEN,)
    assert isinstance(answer, AnswerCommit)


def test_a_commit_that_says_something_else_aborts(decode: DecodeHandoffs) -> None:
    tell(decode)
    (answer,) = commit(decode, replace(TOKEN, token_id=TOKEN.token_id + 1))
    assert isinstance(answer, AnswerCommit)
    assert isinstance(answer.answer, HandoffAborted)


@pytest.mark.parametrize(
    ("words", "link"),
    [
        (replace(WORDS, reservation_id=ReservationId(b"none")), LINK),
        (replace(WORDS, manifest_digest=b"another"), LINK),
        (WORDS, LinkId(Incarnation(4711), 1)),
    ],
)
def test_what_does_not_fit_is_left_to_the_commit(
    decode: DecodeHandoffs, words: SampledAhead, link: LinkId
) -> None:
    assert tell(decode, words, link) == []
    assert land_all(decode) == []
    start, _ = commit(decode)
    assert isinstance(start, Start)


def test_an_aborted_hand_off_does_not_start_on_them(decode: DecodeHandoffs) -> None:
    decode.frame_landed(landed(0))
    decode.abort(envelope(reservation=1), "given up")
    assert tell(decode) == []


def test_they_travel_as_they_are() -> None:
    tokens = (
        FirstToken(token_id=7, output_index=3, sample_index=0),
        FirstToken(token_id=9, output_index=3, sample_index=2),
    )
    words = replace(WORDS, first_tokens=tokens)
    assert codec.sampled_from_wire(codec.sampled_to_wire(words)) == words


@pytest.mark.parametrize("sample_indices", [[], [0, 1]])
def test_tokens_without_their_samples_are_refused(sample_indices: list[int]) -> None:
    wire = link_pb2.TokensSampled(token_ids=[7], sample_indices=sample_indices)
    with pytest.raises(ValueError, match="1 first tokens of"):
        codec.sampled_from_wire(wire)
    with pytest.raises(ValueError, match="0 first tokens"):
        codec.sampled_from_wire(link_pb2.TokensSampled())
