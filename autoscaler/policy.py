"""Decides how many replicas each pool should have: pure, on times that the caller brings.

A pool grows as soon as it needs more than what serves and starts. It shrinks to the largest need
of the last minutes, taken with a margin, so that the survivors still fit and it need not grow again
at once. The pools are coupled: decode does not grow while prefill starves (nothing would come to
it), prefill not while decode is full (it would wait for it), and neither shrinks meanwhile.

The age of the oldest request without a token stands above all predictions: while it is past its
target and nothing starts, the pool that is to blame grows, whatever the figures say.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import inf
from typing import Literal

from autoscaler.demand import Demand
from autoscaler.figures import Decision, Numbers, PoolNumbers, Reading, WorkerFigures
from autoscaler.need import Need
from autoscaler.roster import Roster
from autoscaler.settings import ScalingSettings
from autoscaler.window import Window
from pdserve.predictor.predictor import Predictor
from pdserve.request import Role

KEPT_DECISIONS = 256
FROM_RATES = ("arrivals", "busy replicas")
_MOST_PATIENCE = 4
"""Times `settle_s`."""
POOLS = (Role.PREFILL, Role.DECODE)


@dataclass(slots=True)
class _PoolState:
    survivors: Window
    """Needs with the margin, one a tick."""
    needs: Window
    """Without it, one a tick."""
    grown_s: float | None = None
    started_s: float | None = None
    """When last some replica of the pool was starting."""
    changed_s: float | None = None
    shrunk_s: float | None = None
    settle_s: float = 0.0
    overdue_since_s: float | None = None
    numbers: PoolNumbers = field(default_factory=PoolNumbers)


class ScalingPolicy:
    """The decisions for one cluster. One thread; call `decide` about once a second."""

    def __init__(self, settings: ScalingSettings, predictor: Predictor) -> None:
        """Knows nothing of the cluster yet.

        Args:
            settings: bounds and targets.
            predictor: how long steps take; while it is not fitted, tokens are counted.
        """
        self._settings = settings
        self._roster = Roster(
            lost_s=settings.lost_s,
            start_s=settings.start_s,
            drain_s=settings.drain_s,
            change_s=settings.change_s,
        )
        self._demand = Demand(settings, predictor)
        longest_s = _MOST_PATIENCE * settings.settle_s
        self._pools = {
            role: _PoolState(
                Window(longest_s), Window(settings.confirm_s), settle_s=settings.settle_s
            )
            for role in POOLS
        }
        self._ages = Window(settings.overdue_s)
        self._busy_s: float | None = None
        """When there last was any request."""
        self._history: deque[Decision] = deque(maxlen=KEPT_DECISIONS)

    def use(self, settings: ScalingSettings) -> None:
        """Takes other bounds and targets; what was seen is kept."""
        self._settings = settings
        self._demand.use(settings)

    def leavers(self, now_s: float, role: Role, count: int) -> tuple[str, ...]:
        """Names who would leave a pool next."""
        return self._victims(now_s, role, count)

    @property
    def history(self) -> tuple[Decision, ...]:
        """The last decisions, oldest first."""
        return tuple(self._history)

    @property
    def numbers(self) -> Numbers:
        """What is known of each pool, as of the last call."""
        return {role: state.numbers for role, state in self._pools.items()}

    def decide(self, now_s: float, reading: Reading) -> tuple[Decision, ...]:
        """Takes figures and returns the changes to make; none, most of the time."""
        self._roster.update(now_s, reading.workers)
        traffic = reading.traffic
        if traffic is None:
            # Blind: what serves stays, and time does not pass for those that would shrink.
            return ()
        if self._busy_s is None or traffic.num_in_flight or self._demand.has_new(traffic):
            self._busy_s = now_s
        self._ages.add(now_s, traffic.oldest_s)
        self._demand.note(now_s, traffic, self._roster)
        needs = {role: self._need(now_s, role) for role in POOLS}
        wanted = self._couple(now_s, needs)
        decisions = [*self._grow(now_s, wanted), *self._shrink(now_s)]
        self._history.extend(decisions)
        return tuple(decisions)

    def _need(self, now_s: float, role: Role) -> Need:
        """Notes the numbers of a pool and returns what its own load asks for."""
        state = self._pools[role]
        serving = self._roster.serving(role, now_s)
        starting = self._roster.starting(role, now_s)
        need, strict = self._demand.needs(role)
        is_idle = self._is_idle(now_s)
        bounds = self._settings.range_of(role)
        least = 0 if is_idle else min(1, bounds.most)
        state.survivors.add(now_s, max(strict.replicas, least))
        state.needs.add(now_s, need.replicas)
        if starting:
            state.started_s = now_s
        numbers = self._demand.numbers(role)
        state.numbers = replace(
            numbers,
            num_serving=len(serving),
            num_starting=len(starting),
            num_draining=len(self._roster.draining(role)),
            need=max(need.replicas, least),
            survivors_need=self._survivors_need(now_s, state, is_idle=is_idle),
            offered=need.offered,
            backlog_s=need.backlog_s,
            predicted_s=need.predicted_s,
            why=need.why,
        )
        return replace(need, replicas=max(need.replicas, least))

    def _survivors_need(self, now_s: float, state: _PoolState, *, is_idle: bool) -> int:
        if is_idle:
            return 0
        return int(state.survivors.largest(state.settle_s))

    def _is_idle(self, now_s: float) -> bool:
        assert self._busy_s is not None
        return now_s - self._busy_s >= self._settings.idle_s

    def _couple(self, now_s: float, needs: dict[Role, Need]) -> dict[Role, int]:
        """Returns the sizes to grow to, each pool seen beside the other."""
        is_starving, is_full = self._demand.is_starving, self._demand.is_decode_full
        wanted = {}
        for role, state in self._pools.items():
            numbers, why = state.numbers, needs[role].why
            size = needs[role].replicas
            # With one pool only, it is to blame for everything.
            is_blamed = not is_full if role is Role.PREFILL else is_full or self._has_one_pool
            if self._is_overdue(now_s, state) and is_blamed and size <= numbers.num_active:
                size = numbers.num_active + self._overdue_step(numbers)
                why = "the oldest request waits too long"
            elif (
                size > numbers.num_active > 0
                and why in FROM_RATES
                and numbers.oldest_s <= self._settings.ttft_s
            ):
                # By chance a few seconds may ask for more than the next ones.
                size = max(int(state.needs.least()), numbers.num_active)
            held = ""
            if size > numbers.num_active:
                if role is Role.PREFILL and is_full and why != "arrivals":
                    held = "held back: decode is full"
                elif role is Role.DECODE and is_starving and not is_full and not self._has_one_pool:
                    held = "held back: prefill starves"
            if held:
                size, why = numbers.num_active, held
            elif numbers.num_active:
                # No prediction is good enough to more than double a pool at once.
                size = min(size, 2 * numbers.num_active)
            bounds = self._settings.range_of(role)
            if numbers.num_active < bounds.least:
                why = "below its range"
            wanted[role] = bounds.clamp(size)
            state.numbers = replace(numbers, why=why)
        return wanted

    @property
    def _has_one_pool(self) -> bool:
        return self._settings.prefill.most == 0

    def _is_overdue(self, now_s: float, state: _PoolState) -> bool:
        """Requests wait too long although all that was ordered is there, and had time to help."""
        settings = self._settings
        if state.numbers.num_starting or state.numbers.oldest_s <= settings.ttft_s:
            state.overdue_since_s = None
            return False
        if state.overdue_since_s is None:
            state.overdue_since_s = now_s
        if now_s - state.overdue_since_s < settings.overdue_s or self._ages.has_fallen():
            return False
        last_s = max(state.grown_s or -inf, state.started_s or -inf)
        return now_s - last_s > settings.catch_up_s

    def _overdue_step(self, numbers: PoolNumbers) -> int:
        is_far_off = numbers.oldest_s > 4 * self._settings.ttft_s
        return max(1, numbers.num_active // 2) if is_far_off else 1

    def _grow(self, now_s: float, wanted: dict[Role, int]) -> Iterable[Decision]:
        settings = self._settings
        # Whose requests wait for the other pool comes second when not all can have what they want.
        order = POOLS if not self._demand.is_decode_full else POOLS[::-1]
        room = None
        if settings.most_in_all is not None:
            room = settings.most_in_all - sum(
                state.numbers.num_active + state.numbers.num_draining
                for state in self._pools.values()
            )
        for role in order:
            state = self._pools[role]
            active, size = state.numbers.num_active, wanted[role]
            if size <= active:
                continue
            is_first = active == 0
            if (
                not is_first
                and state.grown_s is not None
                and now_s - state.grown_s < settings.grow_pause_s
            ):
                continue
            granted = size - active if room is None else min(size - active, max(room, 0))
            if granted == 0 or self._flip_is_faster(now_s, role):
                flip = self._flip(now_s, role)
                if flip is not None:
                    yield flip
                    if not settings.flips_in_place:
                        continue
                    # It takes no room: what else is needed starts beside it.
                    active += 1
                    granted = size - active if room is None else min(size - active, max(room, 0))
            if granted > 0:
                room = None if room is None else room - granted
                self._note(state, now_s, "grow")
                yield Decision(
                    at_s=now_s,
                    role=role,
                    kind="grow",
                    size=active + granted,
                    numbers=state.numbers,
                )

    def _flip_is_faster(self, now_s: float, role: Role) -> bool:
        """A replica that keeps what it has loaded has only to drain; one without work, not even.

        How long both take was seen: of the pool's last starts, and of the last flips to it.
        """
        one = self._flipper(now_s, role)
        if one is None:
            return False
        is_idle = not any(_busyness(one)[:2]) and not one.queued_tokens
        flip_s = self._settings.change_s if is_idle else self._roster.flip_s[role]
        return flip_s < self._roster.start_s[role]

    def _flipper(self, now_s: float, role: Role) -> WorkerFigures | None:
        """Returns who would come in place: the least busy that serves, unless it is the last."""
        serving = self._roster.serving(_other(role), now_s)
        if not self._settings.flips_in_place or len(serving) < 2:
            return None
        return min(serving, key=_busyness)

    def _flip(self, now_s: float, role: Role) -> Decision | None:
        """Takes one replica of the other pool, if those left there would still do."""
        other = self._pools[_other(role)]
        numbers, state = other.numbers, self._pools[role]
        bounds = self._settings.range_of(_other(role))
        flipper = self._flipper(now_s, role)
        if flipper is None and self._settings.flips_in_place:
            return None
        left = numbers.num_active - 1
        if left < bounds.least or left < max(1, numbers.survivors_need, numbers.need):
            return None
        if numbers.num_draining:
            # One at a time: the last one has not come yet.
            return None
        retired = self._victims(now_s, _other(role), 1) if flipper is None else (flipper.worker_id,)
        self._note(state, now_s, "grow")
        self._note(other, now_s, "shrink")
        return Decision(
            at_s=now_s,
            role=role,
            kind="flip",
            size=state.numbers.num_active + 1,
            retired=retired,
            numbers=state.numbers,
        )

    def _shrink(self, now_s: float) -> Iterable[Decision]:
        settings = self._settings
        is_idle = self._is_idle(now_s)
        for role, state in self._pools.items():
            numbers = state.numbers
            size = settings.range_of(role).clamp(max(numbers.survivors_need, numbers.need))
            if size >= numbers.num_active or state.changed_s == now_s:
                # One that has just lost a replica to the other pool does not lose more at once.
                continue
            is_above = numbers.num_active > settings.range_of(role).most
            if is_above:
                size = max(size, settings.range_of(role).most)
            elif not is_idle and not self._may_shrink(now_s, role):
                continue
            retired = self._victims(now_s, role, numbers.num_active - size)
            if not retired:
                continue
            size = numbers.num_active - len(retired)
            self._note(state, now_s, "shrink")
            why = "idle" if is_idle else "the others would still do"
            why = "above its range" if is_above else why
            state.numbers = replace(numbers, why=why)
            yield Decision(
                at_s=now_s,
                role=role,
                kind="shrink",
                size=size,
                retired=retired,
                numbers=state.numbers,
            )

    def _may_shrink(self, now_s: float, role: Role) -> bool:
        settings, state = self._settings, self._pools[role]
        if state.survivors.span_s() < state.settle_s:
            return False
        if state.grown_s is not None and now_s - state.grown_s < state.settle_s:
            return False
        if state.changed_s is not None and now_s - state.changed_s < settings.shrink_pause_s:
            return False
        if state.numbers.oldest_s > settings.ttft_s:
            return False
        if role is Role.DECODE:
            # What prefill has not got through yet will come here.
            return not self._demand.is_starving and not self._demand.is_decode_full
        return not self._demand.is_decode_full

    def _victims(self, now_s: float, role: Role, count: int) -> tuple[str, ...]:
        """Names who leaves: those that only start, the newest first; then the least busy.

        By number, it may be nobody: one that serves does not leave while one below it starts.
        """
        if self._settings.leave_by_number:
            return self._last_numbers(now_s, role, count)
        starting = [worker.worker_id for worker in self._roster.starting(role, now_s)]
        serving = sorted(self._roster.serving(role, now_s), key=_busyness)
        names = [*reversed(starting), *(worker.worker_id for worker in serving)]
        return tuple(names[:count])

    def _last_numbers(self, now_s: float, role: Role, count: int) -> tuple[str, ...]:
        starting = {worker.worker_id for worker in self._roster.starting(role, now_s)}
        serving = {worker.worker_id for worker in self._roster.serving(role, now_s)}
        names = sorted(starting | serving, key=_number, reverse=True)[:count]
        if starting - set(names) and serving & set(names):
            names = [name for name in names if name in starting]
        return tuple(names)

    def _note(self, state: _PoolState, now_s: float, kind: Literal["grow", "shrink"]) -> None:
        settings = self._settings
        if kind == "shrink":
            if state.changed_s is not None and now_s - state.changed_s > 2 * state.settle_s:
                state.settle_s = settings.settle_s
            state.shrunk_s = now_s
        else:
            if state.shrunk_s is not None and now_s - state.shrunk_s <= 2 * state.settle_s:
                # It was too small for what came: next time it waits longer.
                state.settle_s = min(2 * state.settle_s, _MOST_PATIENCE * settings.settle_s)
            state.shrunk_s = None
            state.grown_s = now_s
        state.changed_s = now_s


def _other(role: Role) -> Role:
    return Role.DECODE if role is Role.PREFILL else Role.PREFILL


def _number(worker_id: str) -> int:
    return int(worker_id.rpartition("-")[2])


def _busyness(worker: WorkerFigures) -> tuple[int, int, str]:
    return (worker.num_running + worker.num_waiting + worker.num_held, worker.used_blocks, "")
