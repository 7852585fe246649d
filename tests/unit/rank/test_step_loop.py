import threading

from pdserve.engine.batch import PendingStep, StepResult
from pdserve.rank.inbox import ChannelLost, Inbox
from pdserve.rank.outbox import Outbox
from pdserve.rank.step_loop import StepLoop
from pdserve.rpc.channel import BlockingChannel, ChannelClosed, make_pair
from pdserve.rpc.v1 import rank_pb2, worker_pb2
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

    @property
    def awaited(self) -> None:
        """Ends its steps at once."""

    def tick(self) -> None:
        """Has no deadlines."""

    def step(self) -> bool:
        if not self._steps_s:
            self._inbox.post(ChannelLost())
            return False
        self._clock.advance(self._steps_s.pop(0))
        return True

    def pause_s(self) -> float:
        return 1.0

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


def end_of_loop(*events: object) -> rank_pb2.ChangeRole | None:
    """What a loop returns that finds these events in its inbox."""
    clock, inbox = ManualClock(), Inbox()
    for event in events:
        inbox.post(event)
    ours, theirs = make_pair()
    engine = ScriptedEngine(clock, inbox, [])
    outbox = Outbox(BlockingChannel(ours))
    change = StepLoop(engine, inbox, outbox, clock, heartbeat_s=0.1, full_step_s=1.0).run()
    ours.close()
    theirs.close()
    return change


CHANGE = rank_pb2.ToRank(change_role=rank_pb2.ChangeRole(role="decode", incarnation=9))


def test_a_rank_that_is_told_its_next_role_leaves_the_loop_with_it() -> None:
    cancel = rank_pb2.ToRank(cancel=worker_pb2.CancelRequest())
    assert end_of_loop(cancel, CHANGE) == CHANGE.change_role


def test_a_rank_that_is_told_to_end_behind_its_next_role_ends() -> None:
    assert end_of_loop(CHANGE, rank_pb2.ToRank(shutdown=rank_pb2.Shutdown())) is None
    assert end_of_loop(CHANGE, ChannelLost()) is None


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


class DeviceStep:
    """A step on a device that is over when somebody says so."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def is_over(self) -> bool:
        return self.gate.is_set()

    def wait(self) -> None:
        assert self.gate.wait(10.0)

    def result(self) -> StepResult:
        return StepResult(sampled={})


class DeviceEngine:
    """One step in flight from the start; notes what comes while it runs."""

    def __init__(self, clock: ManualClock, inbox: Inbox) -> None:
        self.step_in_flight: DeviceStep | None = DeviceStep()
        self.log: list[str] = []
        self.has_turned = threading.Event()
        self._clock = clock
        self._inbox = inbox

    @property
    def awaited(self) -> PendingStep | None:
        return self.step_in_flight

    def handle(self, event: object) -> None:
        self.has_turned.clear()
        self.log.append(str(event))
        self._clock.advance(0.25)
        if event == "frame 2":
            assert self.step_in_flight is not None
            self.step_in_flight.gate.set()

    def tick(self) -> None:
        """Has no deadlines."""

    def step(self) -> bool:
        self.has_turned.set()
        if self.step_in_flight is None or not self.step_in_flight.is_over():
            return False
        self.log.append("step ended")
        self.step_in_flight = None
        self._inbox.post(ChannelLost())
        return True

    def pause_s(self) -> float:
        return 1.0

    def describe(self) -> rank_pb2.RankHeartbeat:
        return rank_pb2.RankHeartbeat()

    def close(self) -> None:
        """Holds nothing."""


def run_device_loop() -> tuple[DeviceEngine, list[rank_pb2.RankHeartbeat]]:
    clock, inbox = ManualClock(), Inbox()
    ours, theirs = make_pair()
    face = BlockingChannel(theirs)
    engine = DeviceEngine(clock, inbox)
    threads = set(threading.enumerate())

    def feed() -> None:
        # Each once the loop has turned since the one before.
        for name in ("frame 1", "frame 2"):
            assert engine.has_turned.wait(10.0)
            engine.has_turned.clear()
            inbox.post(name)

    feeder = threading.Thread(target=feed)
    feeder.start()
    StepLoop(engine, inbox, Outbox(BlockingChannel(ours)), clock, 0.1, full_step_s=0.0).run()
    feeder.join()
    # Not the number: a thread of another test may end meanwhile.
    assert set(threading.enumerate()) <= threads
    ours.close()
    heartbeats = []
    while True:
        try:
            heartbeats.append(rank_pb2.FromRank.FromString(face.receive()).heartbeat)
        except ChannelClosed:
            theirs.close()
            return engine, heartbeats


def test_what_comes_while_a_step_runs_is_taken_before_the_step_ends() -> None:
    engine, _ = run_device_loop()
    assert engine.log == ["frame 1", "frame 2", "step ended"]


def test_C9_turns_while_a_step_runs_are_no_progress() -> None:
    _, heartbeats = run_device_loop()
    assert {one.progress for one in heartbeats if one.counters.steps == 0} == {1}
    assert heartbeats[-1].progress > 1


def test_a_step_takes_as_long_as_it_was_in_flight() -> None:
    _, heartbeats = run_device_loop()
    assert heartbeats[-1].counters.step_seconds == 0.5
