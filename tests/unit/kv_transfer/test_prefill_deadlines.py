"""How long a hand-off lasts on the prefill side: leases, deadlines, and KV that is held."""

import pytest

from kv_transfer.prefill_actions import (
    DropFrames,
    ReleaseBlocks,
    ReportNeedsPlacement,
    ReportReturned,
    ReturnReason,
    SendRenew,
)
from kv_transfer.prefill_side import PrefillHandoff
from kv_transfer.protocol import CallFailed, HandoffAborted
from pdserve.timeline import ManualClock
from tests.unit.kv_transfer.prefill_steps import (
    Setup,
    be_granted,
    commit,
    kinds,
    pushed,
    reserve,
    send_some,
)
from tests.unit.kv_transfer.sides import CONFIG, NUM_TOKENS, TOKEN, grant, target


def test_the_lease_is_renewed_thrice_in_its_length(
    handoff: PrefillHandoff, clock: ManualClock
) -> None:
    be_granted(handoff)
    renewals = 0
    for _ in range(90):
        clock.advance(0.1)
        renewals += kinds(handoff.tick()).count(SendRenew)
    assert renewals in (2, 3)


def test_A4_a_long_computation_keeps_its_reservation(
    handoff: PrefillHandoff, clock: ManualClock
) -> None:
    be_granted(handoff)
    for _ in range(100):
        clock.advance(1.0)
        assert set(kinds(handoff.tick())) <= {SendRenew}
        handoff.renewed(target(), is_alive=True)
    assert pushed(handoff.computed(NUM_TOKENS)) == [0, 1, 2, 3]


def test_a_reservation_that_is_gone_needs_another_placement(handoff: PrefillHandoff) -> None:
    be_granted(handoff)
    assert kinds(handoff.renewed(target(), is_alive=False)) == [DropFrames, ReportNeedsPlacement]


@pytest.mark.parametrize("setup", [reserve, send_some, commit])
def test_no_stage_lasts_for_ever(handoff: PrefillHandoff, clock: ManualClock, setup: Setup) -> None:
    setup(handoff)
    seen: list[type] = []
    for _ in range(100):
        clock.advance(0.1)
        seen += kinds(handoff.tick())
    assert ReportNeedsPlacement in seen


def test_progress_of_the_link_puts_the_deadline_off(
    handoff: PrefillHandoff, clock: ManualClock
) -> None:
    commit(handoff)
    for index in range(4):
        clock.advance(CONFIG.frame_timeout_s * 1.5)
        handoff.frame_sent(grant().reservation_id, index)
        assert ReportNeedsPlacement not in kinds(handoff.tick())


def test_kv_without_a_place_is_held_and_then_returned(
    handoff: PrefillHandoff, clock: ManualClock
) -> None:
    commit(handoff)
    handoff.commit_answered(target(), HandoffAborted(detail="x"))
    clock.advance(CONFIG.hold_s)
    assert handoff.tick() == []
    clock.advance(0.1)
    report, release = handoff.tick()
    assert isinstance(report, ReportReturned)
    assert report.reason is ReturnReason.PLACEMENT_TIMEOUT
    assert release == ReleaseBlocks()
    assert handoff.place(target(2)) == []


def test_the_hold_does_not_run_while_the_prompt_is_computed(
    handoff: PrefillHandoff, clock: ManualClock
) -> None:
    reserve(handoff)
    handoff.reserve_answered(target(), CallFailed(detail="x"))
    clock.advance(10 * CONFIG.hold_s)
    assert handoff.tick() == []
    handoff.sampled(TOKEN, is_finished=False)
    assert handoff.tick() == []
