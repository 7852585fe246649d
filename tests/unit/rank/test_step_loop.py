from pdserve.rank.inbox import ChannelLost, Inbox
from pdserve.rank.outbox import Outbox
from pdserve.rank.step_loop import StepLoop
from pdserve.rpc.channel import BlockingChannel, ChannelClosed, make_pair
from pdserve.rpc.v1 import rank_pb2
from pdserve.timeline import ManualClock


class ScriptedEngine:
    """Takes the given seconds for each step, then nothing; the face goes away at the end."""

    def __init__(self, clock: ManualClock, inbox: Inbox, steps_s: list[float]) -> None:
        self._clock = clock
        self._inbox = inbox
        self._steps_s = steps_s
        self.handled: list[object] = []

    def handle(self, event: object) -> None:
        self.handled.append(event)

    def tick(self) -> None:
        """Has no deadlines."""

    def step(self) -> bool:
        if not self._steps_s:
            self._inbox.post(ChannelLost())
            return False
        self._clock.advance(self._steps_s.pop(0))
        return True

    def describe(self) -> rank_pb2.RankHeartbeat:
        return rank_pb2.RankHeartbeat()

    def close(self) -> None:
        """Holds nothing."""


def run_loop(steps_s: list[float], full_step_s: float) -> list[rank_pb2.RankHeartbeat]:
    clock, inbox = ManualClock(), Inbox()
    ours, theirs = make_pair()
    face = BlockingChannel(theirs)
    engine = ScriptedEngine(clock, inbox, steps_s)
    outbox = Outbox(BlockingChannel(ours))
    StepLoop(engine, inbox, outbox, clock, heartbeat_s=0.1, full_step_s=full_step_s).run()
    ours.close()
    heartbeats = []
    while True:
        try:
            heartbeats.append(rank_pb2.FromRank.FromString(face.receive()).heartbeat)
        except ChannelClosed:
            theirs.close()
            return heartbeats


def test_C9_after_short_steps_a_full_one_is_still_expected() -> None:
    heartbeats = run_loop([0.15] * 10, full_step_s=3.0)
    assert len(heartbeats) >= 9
    assert all(heartbeat.predicted_step_s == 3.0 for heartbeat in heartbeats)


def test_C9_steps_longer_than_the_one_at_start_raise_the_expectation() -> None:
    heartbeats = run_loop([4.0] * 5, full_step_s=1.0)
    assert abs(heartbeats[-1].predicted_step_s - 4.0) < 1e-9


def test_every_turn_is_progress_and_every_step_is_counted() -> None:
    heartbeats = run_loop([0.2, 0.2, 0.2], full_step_s=0.0)
    assert [heartbeat.progress for heartbeat in heartbeats] == [2, 3, 4]
    assert heartbeats[-1].counters.steps == 3
