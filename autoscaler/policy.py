"""Decides how many replicas each pool should have: pure, on times that the caller brings.

A pool grows as soon as it needs more than what serves and starts. It shrinks to the largest need
of the last minutes, taken with a margin, so that the survivors still fit and it need not grow again
at once. The pools are coupled: decode does not grow while prefill starves (nothing would come to
it), prefill not while decode is full (it would wait for it), and neither shrinks meanwhile.

The age of the oldest request that waits for others stands above all predictions: while it is past
its target and nothing starts, the pool to blame grows, unless it has twice its need and idle
replicas. A prompt that some replica says it computes waits for nobody, however long it is.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from autoscaler.demand import Demand
from autoscaler.figures import Decision, Numbers, PoolNumbers, Reading, WorkerFigures
from autoscaler.leavers import busyness, choose_leavers, is_empty
from autoscaler.need import FORESEEN, Need
from autoscaler.pool_state import PoolState
from autoscaler.reserve import BurstMemory
from autoscaler.roster import Roster
from autoscaler.settings import ScalingSettings
from autoscaler.window import Window
from pdserve.predictor.predictor import Predictor
from pdserve.request import Role

KEPT_DECISIONS = 256
FROM_RATES = ("arrivals", "busy replicas")
POOLS = (Role.PREFILL, Role.DECODE)


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
        self._pools = {role: PoolState(settings) for role in POOLS}
        self._ages = Window(settings.overdue_s)
        self._busy_s: float | None = None
        """When there last was any request."""
        self._bursts = BurstMemory(settings.burst_memory_s)
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
        demands = {role: self._demand.needs(role) for role in POOLS}
        peak_per_s = self._look_for_burst(now_s, demands)
        needs = {role: self._note_need(now_s, role, *demands[role], peak_per_s) for role in POOLS}
        wanted = self._couple(now_s, needs)
        decisions = [*self._grow(now_s, wanted), *self._shrink(now_s)]
        self._history.extend(decisions)
        return tuple(decisions)

    def _look_for_burst(self, now_s: float, demands: dict[Role, tuple[Need, Need]]) -> float:
        """Returns the rate that bursts of the last while came with; 0 without any."""
        first = Role.DECODE if self._has_one_pool else Role.PREFILL
        self._bursts.note(
            now_s,
            self._demand.requests_per_s,
            lambda rate: self._demand.replicas_for(first, demands[first][0], rate),
            is_late=self._ages.last > self._settings.ttft_s,
            num_serving=len(self._roster.serving(first, now_s)),
            start_s=self._roster.start_s[first],
        )
        return 0.0 if self._is_idle(now_s) else self._bursts.peak_per_s(now_s)

    def _note_need(
        self, now_s: float, role: Role, need: Need, strict: Need, peak_per_s: float
    ) -> Need:
        """Notes the numbers of a pool and returns what its own load asks for."""
        state = self._pools[role]
        starting = self._roster.starting(role, now_s)
        least = 0 if self._is_idle(now_s) else min(1, self._settings.range_of(role).most)
        state.survivors.add(now_s, max(strict.replicas, least))
        state.needs.add(now_s, need.replicas)
        if starting:
            state.started_s = now_s
        reserve = self._demand.replicas_for(role, need, peak_per_s) if peak_per_s else 0
        settled = 0 if self._is_idle(now_s) else int(state.survivors.largest(state.settle_s))
        state.numbers = replace(
            self._demand.numbers(role),
            num_serving=len(self._roster.serving(role, now_s)),
            num_starting=len(starting),
            num_draining=len(self._roster.draining(role)),
            need=max(need.replicas, least),
            survivors_need=max(settled, reserve),
            reserve=reserve,
            offered=need.offered,
            backlog_s=need.backlog_s,
            predicted_s=need.predicted_s,
            why=need.why,
        )
        return replace(need, replicas=max(need.replicas, least))

    def _is_idle(self, now_s: float) -> bool:
        assert self._busy_s is not None
        return now_s - self._busy_s >= self._settings.idle_s

    def _couple(self, now_s: float, needs: dict[Role, Need]) -> dict[Role, int]:
        """Returns the sizes to grow to, each pool seen beside the other."""
        wanted = {}
        for role, state in self._pools.items():
            numbers = state.numbers
            size, why = self._size_alone(now_s, role, needs[role])
            held = self._reason_to_wait(role, why) if size > numbers.num_active else ""
            if held and needs[role].foreseen > numbers.num_active:
                # Not for what is there, which would be of no use yet, but for what is on its way.
                size, why, held = needs[role].foreseen, FORESEEN, ""
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

    def _size_alone(self, now_s: float, role: Role, need: Need) -> tuple[int, str]:
        """Returns the size that a pool's own figures ask for, and why."""
        settings, state = self._settings, self._pools[role]
        is_full = self._demand.is_decode_full
        active, oldest_s = state.numbers.num_active, state.numbers.oldest_s
        # With one pool only, it is to blame for everything.
        is_blamed = not is_full if role is Role.PREFILL else is_full or self._has_one_pool
        # Asked even where nobody is to blame: it remembers since when.
        is_overdue = state.is_overdue(now_s, settings, self._ages) and is_blamed
        if is_overdue and state.numbers.need <= active and not self._has_spare(now_s, role):
            size = active + self._overdue_step(state.numbers)
            return size, "the oldest request waits too long"
        is_calm = need.why in FROM_RATES and oldest_s <= settings.ttft_s
        if is_calm and state.numbers.need > active > 0:
            # By chance a few seconds may ask for more than the next ones.
            return max(int(state.needs.least()), active), need.why
        return need.replicas, need.why

    def _reason_to_wait(self, role: Role, why: str) -> str:
        """Says why a pool must not grow; nothing if it may."""
        if role is Role.PREFILL:
            is_held = self._demand.is_decode_full and why != "arrivals"
            return "held back: decode is full" if is_held else ""
        # Whoever starves waits for a first decode replica, too.
        is_first = self._has_one_pool or not self._pools[role].numbers.num_active
        is_held = self._demand.is_starving and not self._demand.is_decode_full and not is_first
        return "held back: prefill starves" if is_held else ""

    @property
    def _has_one_pool(self) -> bool:
        return self._settings.prefill.most == 0

    def _has_spare(self, now_s: float, role: Role) -> bool:
        """Twice what it needs, some of it idle: a prompt may be late by its own length alone."""
        numbers, serving = self._pools[role].numbers, self._roster.serving(role, now_s)
        return numbers.num_active >= 2 * numbers.need and any(map(is_empty, serving))

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
                state.note_growth(now_s, settings)
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
        flip_s = self._settings.change_s if is_empty(one) else self._roster.flip_s[role]
        return flip_s < self._roster.start_s[role]

    def _flipper(self, now_s: float, role: Role) -> WorkerFigures | None:
        """Returns who would come in place: the least busy that serves, unless it is the last."""
        serving = self._roster.serving(_other(role), now_s)
        if not self._settings.flips_in_place or len(serving) < 2:
            return None
        return min(serving, key=busyness)

    def _flip(self, now_s: float, role: Role) -> Decision | None:
        """Takes one replica of the other pool, if those left there would still do."""
        settings, other = self._settings, self._pools[_other(role)]
        numbers, state = other.numbers, self._pools[role]
        bounds = settings.range_of(_other(role))
        flipper = self._flipper(now_s, role)
        if flipper is None and settings.flips_in_place:
            return None
        left = numbers.num_active - 1
        if left < bounds.least or left < max(1, numbers.survivors_need, numbers.need):
            return None
        if numbers.num_draining:
            # One at a time: the last one has not come yet.
            return None
        retired = self._victims(now_s, _other(role), 1) if flipper is None else (flipper.worker_id,)
        state.note_growth(now_s, settings)
        other.note_shrinking(now_s, settings)
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
            state.note_shrinking(now_s, settings)
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
        if not state.has_settled(now_s, settings) or state.numbers.oldest_s > settings.ttft_s:
            return False
        if role is Role.DECODE:
            # What prefill has not got through yet will come here.
            return not self._demand.is_starving and not self._demand.is_decode_full
        return not self._demand.is_decode_full

    def _victims(self, now_s: float, role: Role, count: int) -> tuple[str, ...]:
        """Names who leaves."""
        return choose_leavers(
            self._roster.starting(role, now_s),
            self._roster.serving(role, now_s),
            count,
            by_number=self._settings.leave_by_number,
        )


def _other(role: Role) -> Role:
    return Role.DECODE if role is Role.PREFILL else Role.PREFILL
