"""What is asked of each pool: the figures of the last minutes, turned into needs. Pure."""

from dataclasses import dataclass, replace
from math import ceil

from autoscaler.contexts import ContextMeter
from autoscaler.figures import PoolNumbers, Traffic, WorkerFigures
from autoscaler.lengths import LengthMeter
from autoscaler.need import (
    DecodeLoad,
    Flow,
    Need,
    PrefillLoad,
    count_servers,
    decode_need,
    prefill_need,
)
from autoscaler.roster import Roster
from autoscaler.settings import ScalingSettings
from autoscaler.speed import SpeedMeter
from autoscaler.window import CounterWindow, Window
from pdserve.predictor.predictor import DecodeSample, FitQuality, Predictor, PrefillSample
from pdserve.request import Role

_MOST_GROWTH = 1.5
"""A rise is not followed further than this: what climbs does not climb forever."""
_RECENT_S = 5.0
"""Long enough for a rate of some requests a second, short beside the start of a replica."""
_LEAST_RISE_S = 120.0
"""Over shorter times, chance looks like a climb."""


@dataclass(slots=True)
class _Counts:
    arrived: CounterWindow
    prompt_tokens: CounterWindow
    output_tokens: CounterWindow
    busy: Window
    """Replicas that have prompts to compute."""
    prompts: Window
    """That wait or are computed."""
    sequences: Window
    running: Window


class Demand:
    """Watches traffic and loads. One thread."""

    def __init__(self, settings: ScalingSettings, predictor: Predictor) -> None:
        """Has seen nothing."""
        self._settings = settings
        self._predictor = predictor
        self._keep_s = keep_s = 4 * max(settings.rate_window_s, _LEAST_RISE_S, settings.start_s)
        self._counts = _Counts(
            arrived=CounterWindow(keep_s),
            prompt_tokens=CounterWindow(keep_s),
            output_tokens=CounterWindow(keep_s),
            busy=Window(keep_s),
            prompts=Window(keep_s),
            sequences=Window(keep_s),
            running=Window(keep_s),
        )
        self._lengths = LengthMeter()
        self._contexts = ContextMeter(keep_s)
        self._speed = SpeedMeter()
        self._traffic: Traffic | None = None
        self._workers: dict[Role, list[WorkerFigures]] = {role: [] for role in Role}
        self._start_s = dict.fromkeys(Role, settings.start_s)
        self._coming_s = dict.fromkeys(Role, 0.0)
        self._num_active = dict.fromkeys(Role, 0)
        self._flow: Flow | None = None
        self._serving_ids: frozenset[str] = frozenset()
        self._is_backlogged = False

    def use(self, settings: ScalingSettings) -> None:
        """Takes other bounds and targets; what was seen is kept."""
        self._settings = settings

    def has_new(self, traffic: Traffic) -> bool:
        """Says whether requests came since the last call of `note`."""
        return self._traffic is not None and traffic.num_arrived != self._traffic.num_arrived

    def note(self, now_s: float, traffic: Traffic, roster: Roster) -> None:
        """Takes figures; replicas that only start have none that count."""
        self._traffic = traffic
        self._workers = {role: roster.serving(role, now_s) for role in Role}
        self._start_s = dict(roster.start_s)
        self._num_active = {
            role: len(self._workers[role]) + len(roster.starting(role, now_s)) for role in Role
        }
        self._coming_s = {role: roster.coming_s(role, now_s) for role in Role}
        prefill, decode = self._workers[Role.PREFILL], self._workers[Role.DECODE]
        counts = self._counts
        counts.arrived.add(now_s, traffic.num_arrived)
        counts.prompt_tokens.add(now_s, traffic.prompt_tokens)
        counts.output_tokens.add(now_s, traffic.output_tokens)
        if self._settings.prefill.most:
            num_busy = sum(w.num_running > 0 or w.queued_tokens > 0 for w in prefill)
        else:
            num_busy = sum(w.queued_tokens > 0 for w in decode)
        counts.busy.add(now_s, num_busy)
        counts.prompts.add(now_s, self._num_prompts(Role.PREFILL) + self._num_prompts(Role.DECODE))
        first = Role.PREFILL if self._settings.prefill.most else Role.DECODE
        self._speed.note(
            now_s,
            self._workers[first],
            traffic.prompt_tokens,
            self._backlog_tokens(first),
            num_busy,
        )
        self._lengths.note(now_s, traffic.num_arrived, traffic.prompt_tokens)
        counts.running.add(now_s, sum(w.num_running for w in decode))
        self._contexts.note(now_s, decode)
        counts.sequences.add(
            now_s,
            sum(w.num_running + w.num_waiting for w in decode) + sum(w.num_held for w in prefill),
        )
        ids = frozenset(w.worker_id for w in decode)
        if ids != self._serving_ids:
            self._serving_ids = ids
            # A pool of another size, or with a cold replica in it: its times say nothing yet.
            counts.running.clear()

    @property
    def is_decode_full(self) -> bool:
        """No decode replica has room: what prefill computes has to wait."""
        decode = self._workers[Role.DECODE]
        if not decode:
            return False
        has_slots = any(w.num_running + w.num_waiting < w.max_num_seqs for w in decode)
        return not has_slots or self._kv_share(Role.DECODE) >= self._settings.kv_full_share

    @property
    def is_starving(self) -> bool:
        """Prompts wait for prefill longer than they should, or will."""
        if self._traffic is None:
            return False
        return self._is_backlogged or self._traffic.oldest_s > self._settings.ttft_s

    def needs(self, role: Role) -> tuple[Need, Need]:
        """Returns what a pool needs, and what it would need with the margin of shrinking."""
        settings, predictor = self._settings, self._predictor
        margin = settings.shrink_margin
        if settings.range_of(role).most == 0:
            none = Need(replicas=0, why="this pool is off")
            return none, none
        if role is Role.PREFILL:
            load = self._prefill_load(Role.PREFILL)
            need = prefill_need(load, settings, predictor)
            self._is_backlogged = (need.backlog_s or 0.0) > settings.ttft_s * max(
                load.num_serving, 1
            )
            self._flow = self._flow_of(load, need) if self._is_backlogged else None
            # A climb that is foreseen is no reason to keep replicas of a hill that was climbed.
            steady = replace(load, growth=1.0)
            return need, prefill_need(steady, settings, predictor, margin)
        own = self._decode_load()
        need = decode_need(own, settings, predictor)
        strict = decode_need(replace(own, growth=1.0), settings, predictor, margin)
        if settings.prefill.most == 0:
            # Decode replicas prefill: whichever half of their work asks for more.
            prompts = self._prefill_load(Role.DECODE)
            need = _larger(need, prefill_need(prompts, settings, predictor))
            strict = _larger(strict, prefill_need(prompts, settings, predictor, margin))
        return need, strict

    @property
    def requests_per_s(self) -> float:
        """On the mean of the last while."""
        return self._counts.arrived.per_s(self._settings.rate_window_s)

    def replicas_for(self, role: Role, need: Need, requests_per_s: float) -> int:
        """Returns how many replicas a rate would need of prompts and outputs as they are now.

        Args:
            role: of the pool.
            need: of that pool, as of now: what it knows of times.
            requests_per_s: the rate.
        """
        settings, count = self._settings, 0
        if need.service_s is not None:
            offered = requests_per_s * need.service_s
            count = count_servers(offered, need.service_s, settings, need.variability)
        if role is Role.DECODE and self._workers[role]:
            most = min(worker.max_num_seqs for worker in self._workers[role])
            each_per_s = need.tokens_per_s or most / settings.tpot_s
            count = max(count, ceil(requests_per_s * self._tokens_per_request / each_per_s))
        return count

    def numbers(self, role: Role) -> PoolNumbers:
        """Returns the figures that the needs of a pool rest on."""
        assert self._traffic is not None
        workers = self._workers[role]
        is_first = role is Role.PREFILL or self._settings.prefill.most == 0
        return PoolNumbers(
            backlog_tokens=self._backlog_tokens(role) if is_first else 0,
            oldest_s=self._traffic.oldest_s,
            num_sequences=sum(w.num_running + w.num_waiting for w in workers),
            kv_share=self._kv_share(role),
            tpot_s=self._measured_tpot_s if role is Role.DECODE else None,
            fit=self._fit_of(role, _class_of(workers)),
        )

    def _fit_of(self, role: Role, worker_class: str) -> FitQuality | None:
        kind = PrefillSample if role is Role.PREFILL else DecodeSample
        if self._predictor.law(worker_class, kind) is None:
            return None
        name = "prefill" if role is Role.PREFILL else "decode"
        return next(
            one
            for one in self._predictor.qualities()
            if (one.worker_class, one.kind) == (worker_class, name)
        )

    def _flow_of(self, load: PrefillLoad, need: Need) -> Flow | None:
        """Returns what prefill will send while it catches up; None while nobody knows."""
        if not need.service_s:
            return None
        recent_per_s = max(load.requests_per_s, load.recent_per_s)
        return Flow(
            per_s=min(
                recent_per_s + load.num_prompts / self._settings.catch_up_s,
                self._num_active[Role.PREFILL] / need.service_s,
            ),
            # What came faster in the last few seconds is among the prompts that there are.
            comes_per_s=load.requests_per_s,
            num_prompts=load.num_prompts,
        )

    def _prefill_load(self, role: Role) -> PrefillLoad:
        assert self._traffic is not None
        settings, counts = self._settings, self._counts
        workers = self._workers[role]
        rate = counts.arrived.per_s(settings.rate_window_s)
        recent = counts.arrived.per_s(min(_RECENT_S, settings.rate_window_s))
        ahead_s = self._start_s[role]
        over_s = max(_LEAST_RISE_S, 2 * ahead_s)
        rise = counts.prompt_tokens.rise(over_s) * (ahead_s + settings.rate_window_s / 2)
        tokens_per_s = counts.prompt_tokens.per_s(settings.rate_window_s)
        return PrefillLoad(
            worker_class=_class_of(workers),
            requests_per_s=rate,
            tokens_per_s=tokens_per_s,
            backlog_tokens=self._backlog_tokens(role),
            num_prompts=self._num_prompts(role),
            oldest_s=self._traffic.oldest_s,
            num_serving=len(workers),
            busy_replicas=counts.busy.mean(settings.rate_window_s),
            measured_tokens_per_s=self._speed.tokens_per_s,
            start_s=ahead_s,
            chunk_tokens=min((w.chunk_tokens for w in workers), default=0),
            recent_per_s=recent,
            coming_s=self._coming_s[role],
            growth=_growth(tokens_per_s, rise),
            variability=self._lengths.variability,
        )

    def _decode_load(self) -> DecodeLoad:
        settings, counts = self._settings, self._counts
        workers = self._workers[Role.DECODE]
        # The most of the last seconds: sequences that end at once leave room only for a moment.
        sequences = counts.sequences.mean(settings.rate_window_s / 3)
        ahead_s = self._start_s[Role.DECODE]
        over_s = max(_LEAST_RISE_S, 2 * ahead_s)
        rise = counts.sequences.mean_rise(over_s) * ahead_s
        used = sum(w.used_blocks * w.block_size for w in workers)
        held = sum(w.total_blocks * w.block_size for w in workers)
        return DecodeLoad(
            worker_class=_class_of(workers),
            num_sequences=max(sequences, counts.sequences.last),
            mean_sequences=counts.sequences.mean(settings.rate_window_s),
            num_running=sum(w.num_running for w in workers),
            used_tokens=used,
            tokens_per_replica=held / len(workers) if workers else 0.0,
            max_num_seqs=min((w.max_num_seqs for w in workers), default=1),
            measured_tpot_s=self._measured_tpot_s,
            num_serving=len(workers),
            tokens_of_each=self._contexts.tokens_of_each(settings.rate_window_s),
            made_tokens_per_s=counts.output_tokens.per_s(settings.rate_window_s),
            tokens_per_request=self._tokens_per_request,
            flow=self._flow,
            growth=_growth(sequences, rise),
        )

    @property
    def _tokens_per_request(self) -> float:
        """Output tokens of a request, on the mean of all that is remembered.

        Those that have none yet do not count, and those that run as half: where many came at once,
        most of what they ask for is still to be made.
        """
        counts, over_s = self._counts, self._keep_s
        arrived, made = counts.arrived.grown(over_s), counts.output_tokens.grown(over_s)
        begun = arrived - counts.prompts.rise_since(over_s)
        ended = begun - counts.sequences.rise_since(over_s) / 2
        if ended <= 0:
            # The first ones, or figures of different times: at least so much was made.
            ended = arrived
        return made / ended if ended > 0 else 0.0

    def _num_prompts(self, role: Role) -> int:
        assert self._traffic is not None
        is_first = role is (Role.PREFILL if self._settings.prefill.most else Role.DECODE)
        workers = self._workers[role]
        count = sum(w.num_waiting for w in workers)
        if role is Role.PREFILL:
            count += sum(w.num_running for w in workers)
        return count + (self._traffic.num_waiting if is_first else 0)

    def _backlog_tokens(self, role: Role) -> int:
        assert self._traffic is not None
        queued = sum(w.queued_tokens for w in self._workers[role])
        return queued + self._traffic.waiting_tokens

    def _kv_share(self, role: Role) -> float:
        total = sum(w.total_blocks for w in self._workers[role])
        used = sum(w.used_blocks for w in self._workers[role])
        return used / total if total else 0.0

    @property
    def _measured_tpot_s(self) -> float | None:
        """Sequences that run, over tokens per second; None before the pool has settled."""
        over_s = self._settings.rate_window_s
        tokens_per_s = self._counts.output_tokens.per_s(over_s)
        if tokens_per_s <= 0 or self._counts.running.span_s() < over_s:
            return None
        return self._counts.running.mean(over_s) / tokens_per_s


def _class_of(workers: list[WorkerFigures]) -> str:
    """Returns the class of a pool: of the first that has said it."""
    return next((worker.worker_class for worker in workers if worker.worker_class), "")


def _growth(now: float, rise: float) -> float:
    return min(1.0 + rise / now, _MOST_GROWTH) if now > 0 else 1.0


def _larger(one: Need, other: Need) -> Need:
    larger, smaller = (one, other) if one.replicas >= other.replicas else (other, one)
    return replace(
        larger,
        service_s=larger.service_s or smaller.service_s,
        tokens_per_s=larger.tokens_per_s or smaller.tokens_per_s,
    )
