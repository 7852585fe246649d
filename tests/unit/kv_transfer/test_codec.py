import pytest

from kv_transfer.codec import (
    commit_answer_from_wire,
    commit_answer_to_wire,
    envelope_from_wire,
    envelope_to_wire,
    first_token_from_wire,
    first_token_to_wire,
    reserve_answer_from_wire,
    reserve_answer_to_wire,
    target_from_wire,
    target_to_wire,
)
from kv_transfer.protocol import Acknowledged, FirstToken, HandoffAborted, Refusal, RefusalReason
from pdserve.rpc.v1 import handoff_pb2
from tests.unit.kv_transfer.sides import envelope, grant, target


@pytest.mark.parametrize("sent", [envelope(), envelope(3, 4, 5)])
def test_an_envelope_comes_back_as_it_was(sent: object) -> None:
    assert envelope_from_wire(envelope_to_wire(sent)) == sent  # type: ignore[arg-type]


def test_a_target_comes_back_as_it_was() -> None:
    assert target_from_wire(target_to_wire(target(7))) == target(7)


def test_a_first_token_comes_back_as_it_was() -> None:
    token = FirstToken(token_id=0, output_index=12, sample_index=3)
    assert first_token_from_wire(first_token_to_wire(token)) == token


@pytest.mark.parametrize("reason", RefusalReason)
def test_every_refusal_comes_back_as_it_was(reason: RefusalReason) -> None:
    refusal = Refusal(reason=reason, detail="why", retry_after_s=0.5)
    assert reserve_answer_from_wire(reserve_answer_to_wire(refusal)) == refusal
    aborted = HandoffAborted(reason=reason, detail="why")
    assert commit_answer_from_wire(commit_answer_to_wire(aborted)) == aborted


def test_a_grant_comes_back_as_it_was() -> None:
    assert reserve_answer_from_wire(reserve_answer_to_wire(grant())) == grant()


def test_an_acknowledgement_comes_back_as_it_was() -> None:
    assert commit_answer_from_wire(commit_answer_to_wire(Acknowledged())) == Acknowledged()


def test_answers_without_an_outcome_are_refused() -> None:
    with pytest.raises(ValueError, match="ReserveResponse"):
        reserve_answer_from_wire(handoff_pb2.ReserveResponse())
    with pytest.raises(ValueError, match="CommitResponse"):
        commit_answer_from_wire(handoff_pb2.CommitResponse())
