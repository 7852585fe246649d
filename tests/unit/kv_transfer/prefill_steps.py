"""What can happen to the prefill side, in a word each."""

from collections.abc import Callable

from kv_transfer.prefill_actions import PrefillAction, PushFrame
from kv_transfer.prefill_side import PrefillHandoff
from tests.unit.kv_transfer.sides import TOKEN, grant, target


def kinds(actions: list[PrefillAction]) -> list[type]:
    return [type(action) for action in actions]


def pushed(actions: list[PrefillAction]) -> list[int]:
    return [action.frame.index for action in actions if isinstance(action, PushFrame)]


def steps_of(actions: list[PrefillAction]) -> list[int | None]:
    return [action.after_step for action in actions if isinstance(action, PushFrame)]


def reserve(handoff: PrefillHandoff) -> None:
    handoff.place(target())


def be_granted(handoff: PrefillHandoff) -> None:
    reserve(handoff)
    handoff.reserve_answered(target(), grant())


def send_some(handoff: PrefillHandoff) -> None:
    be_granted(handoff)
    handoff.computed(64)


def commit(handoff: PrefillHandoff) -> None:
    send_some(handoff)
    handoff.sampled(TOKEN, is_finished=False)


def nothing(handoff: PrefillHandoff) -> None:
    pass


STAGES = [nothing, reserve, be_granted, send_some, commit]
Setup = Callable[[PrefillHandoff], None]
