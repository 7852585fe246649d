"""What can happen to the decode side, in a word each."""

from collections.abc import Callable
from dataclasses import replace

from kv_transfer.decode_actions import AnswerCommit, AnswerReserve, DecodeAction, Scatter
from kv_transfer.decode_side import DecodeHandoffs
from kv_transfer.events import FramePlaced
from kv_transfer.protocol import Envelope, Grant, HandoffAborted, Refusal, RefusalReason
from pdserve.request import Request, ReservationId
from tests.unit.kv_transfer.sides import MANIFEST, REQUEST, TOKEN, envelope, landed

NUM_FRAMES = len(MANIFEST.frames)
RESERVATION = ReservationId(b"res1")


def ask(
    decode: DecodeHandoffs, sent: Envelope | None = None, request: Request | None = None
) -> Grant | Refusal:
    sent = sent or envelope()
    request = request or replace(REQUEST, attempt=sent.attempt)
    return reserve_answer(decode.reserve(1, sent, request))


def reserve_answer(actions: list[DecodeAction]) -> Grant | Refusal:
    (answer,) = (action.answer for action in actions if isinstance(action, AnswerReserve))
    return answer


def reason(answer: Grant | Refusal) -> RefusalReason:
    assert isinstance(answer, Refusal)
    return answer.reason


def commit(decode: DecodeHandoffs, call_id: int = 5, reservation: int = 1) -> list[DecodeAction]:
    sent = envelope(reservation=reservation)
    return decode.commit(call_id, sent, (TOKEN,), MANIFEST.digest)


def land(decode: DecodeHandoffs, index: int) -> list[DecodeAction]:
    (scatter,) = decode.frame_landed(landed(index))
    assert isinstance(scatter, Scatter)
    return decode.frame_scattered(scatter.reservation_id, index)


def aborted(actions: list[DecodeAction]) -> HandoffAborted:
    (answer,) = (action.answer for action in actions if isinstance(action, AnswerCommit))
    assert isinstance(answer, HandoffAborted)
    return answer


def be_granted(decode: DecodeHandoffs) -> None:
    ask(decode)


def receive_some(decode: DecodeHandoffs) -> None:
    ask(decode)
    land(decode, 0)


def receive_all(decode: DecodeHandoffs) -> None:
    ask(decode)
    for index in range(NUM_FRAMES):
        land(decode, index)


def be_committed(decode: DecodeHandoffs) -> None:
    receive_some(decode)
    commit(decode)


Setup = Callable[[DecodeHandoffs], None]
STAGES = [be_granted, receive_some, receive_all, be_committed]


def placed(index: int, **other: object) -> FramePlaced:
    one = landed(index)
    fields = {
        "link": one.link,
        "reservation_id": one.reservation_id,
        "frame_index": index,
        "num_bytes": one.num_bytes,
        "is_intact": True,
    }
    return FramePlaced(**fields | other)  # type: ignore[arg-type]
