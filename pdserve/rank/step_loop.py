"""The turn of a rank: events in, leases and deadlines, one engine step, updates out."""

from typing import Protocol

from pdserve.cache.cached_granules import CachedGranules
from pdserve.engine.batch import PendingStep
from pdserve.rank.inbox import ChannelLost, Inbox
from pdserve.rank.outbox import Outbox
from pdserve.rank.step_waiter import StepOver, StepWaiter
from pdserve.rpc.v1 import rank_pb2
from pdserve.timeline import Clock

IDLE_WAIT_S = 0.02
"""Longest sleep between turns; bounds how late a lease or deadline is noticed."""


class Engine(Protocol):
    """What a pool's rank does in each turn. Called from the engine thread only."""

    def handle(self, event: object) -> None:
        """Takes one event: a ToRank message or something a link posted."""
        ...

    def tick(self) -> None:
        """Looks at clocks: leases, deadlines, hold times."""
        ...

    @property
    def awaited(self) -> PendingStep | None:
        """The oldest step in flight."""
        ...

    def step(self) -> bool:
        """Launches what can be launched, and ends the oldest step if it is over; waits for none.

        A device that computes in `launch` has ended its step by then, so a turn takes no longer
        than the longest step.

        Returns:
            Whether a step has ended.
        """
        ...

    def pause_s(self) -> float:
        """Returns how long the loop may wait for an event before it calls `step` again."""
        ...

    def describe(self) -> rank_pb2.RankHeartbeat:
        """Returns load, ledger, links and counters."""
        ...

    def close(self) -> None:
        """Ends all links and their threads: a live Gloo thread aborts the process at exit."""
        ...


def is_end(event: object) -> bool:
    """Says whether an event ends this process."""
    is_told = isinstance(event, rank_pb2.ToRank) and event.HasField("shutdown")
    return is_told or isinstance(event, ChannelLost)


class StepLoop:
    """Runs an engine until the face says so or is gone.

    It waits in one place, the inbox: for messages, for what links report, and for the end of the
    oldest step in flight. So a frame that lands in the middle of a step is unpacked in the middle
    of that step.
    """

    def __init__(
        self,
        engine: Engine,
        inbox: Inbox,
        outbox: Outbox,
        clock: Clock,
        heartbeat_s: float,
        *,
        full_step_s: float,
        granules: CachedGranules | None = None,
    ) -> None:
        """Turns nothing yet.

        Args:
            engine: what is turned.
            inbox: events for it.
            outbox: updates and heartbeats out of it.
            clock: time of steps and heartbeats.
            heartbeat_s: longest time between two heartbeats, but for one step.
            full_step_s: a step of the whole token budget, as measured at start.
            granules: what the engine's prefix cache holds; None: nobody wants to know.
        """
        self._engine = engine
        self._inbox = inbox
        self._outbox = outbox
        self._clock = clock
        self._heartbeat_s = heartbeat_s
        self._progress = 1
        self._waiter = StepWaiter(inbox.post)
        self._busy_since_s: float | None = None
        """Since when the oldest step in flight has had the device; None: nothing is in flight."""
        self._full_step_s = full_step_s
        self._granules = granules
        self._step_s = 0.0
        self._steps = 0
        self._total_step_s = 0.0

    def run(self) -> rank_pb2.ChangeRole | None:
        """Turns until shutdown, or until the face wants another role; returns which one.

        Raises:
            ChannelClosed: the face died while something was sent to it.
        """
        try:
            return self._turn_until_told()
        finally:
            self._waiter.close()

    def _turn_until_told(self) -> rank_pb2.ChangeRole | None:
        has_ended = False
        next_heartbeat_s = self._clock.now()
        while True:
            pause_s = 0.0 if has_ended else min(IDLE_WAIT_S, self._engine.pause_s())
            events = self._inbox.drain(pause_s)
            for event in events:
                if isinstance(event, StepOver):
                    continue
                if is_end(event):
                    return None
                if isinstance(event, rank_pb2.ToRank) and event.HasField("change_role"):
                    # Behind it there may be word that this process is to end instead.
                    return None if any(map(is_end, events)) else event.change_role
                self._engine.handle(event)
            self._engine.tick()
            has_ended = self._timed_step()
            self._outbox.flush()
            if self._granules is not None:
                self._outbox.tell_cached(self._granules.take_changes())
            awaited = self._engine.awaited
            if has_ended or awaited is None:
                # A device that never ends its step is frozen, however often this loop turns.
                self._progress += 1
            else:
                self._waiter.watch(awaited)
            if self._clock.now() >= next_heartbeat_s:
                self._send_heartbeat()
                next_heartbeat_s = self._clock.now() + self._heartbeat_s

    def _timed_step(self) -> bool:
        if self._busy_since_s is None:
            self._busy_since_s = self._clock.now()
        has_ended = self._engine.step()
        now_s, since_s = self._clock.now(), self._busy_since_s
        if self._engine.awaited is None:
            self._busy_since_s = None
        elif has_ended:
            self._busy_since_s = now_s
        if not has_ended:
            return False
        seconds = now_s - since_s
        self._step_s = seconds if self._step_s == 0.0 else 0.8 * self._step_s + 0.2 * seconds
        self._steps += 1
        self._total_step_s += seconds
        return True

    def _send_heartbeat(self) -> None:
        heartbeat = self._engine.describe()
        heartbeat.progress = self._progress
        # After a thousand short decode steps, the next one may be a full prefill step.
        heartbeat.predicted_step_s = max(self._step_s, self._full_step_s)
        heartbeat.counters.steps = self._steps
        heartbeat.counters.step_seconds = self._total_step_s
        self._outbox.send(rank_pb2.FromRank(heartbeat=heartbeat))
