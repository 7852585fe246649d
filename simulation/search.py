"""Searches the pools that a workload needs: the fewest GPUs that keep the objectives.

    1. a lower bound of each pool, from the profile's laws and the workload alone
    2. grow the pool that misses its objective, until a share of requests keeps both
    3. shrink either pool while that share still does
    4. the chosen plan under other rates: where it breaks

A plan is tried by simulating it, once for each pair of sizes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from pdserve.errors import ConfigError
from pdserve.predictor.profile import Profile
from simulation.bounds import hopeless_share, lower_bounds
from simulation.cluster import Cluster
from simulation.piece_chain import PromptChains
from simulation.report import Report, Slo, make_report
from simulation.sampling import Sample
from simulation.shape import ClusterShape
from simulation.workload import Workload, scale_rate

SIMULATED_BLOCK_TOKENS = 128
"""Coarser than blocks in service: a long prompt is simulated in an eighth of the time."""
FRONTIER_RATES = (0.5, 0.75, 1.25, 1.5, 2.0)
_HEADROOM = 1.15
"""The first try, over the lower bound."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One plan, and what came of it."""

    profile: Profile
    num_prefill: int
    """0: decode workers compute the prompts themselves."""
    num_decode: int
    rate: float
    """Times the workload's own."""
    report: Report

    @property
    def num_gpus(self) -> int:
        """Of the plan."""
        return (self.num_prefill + self.num_decode) * max(self.profile.num_gpus, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What was found."""

    chosen: Trial | None
    """None: no plan within the limits keeps the objectives."""
    trials: tuple[Trial, ...]
    """All that were tried at the workload's own rate, in their order."""
    frontier: tuple[Trial, ...]
    """The chosen plan at several rates, its own included."""
    slo: Slo
    attainment: float
    sample: str
    hopeless_share: float
    """Of the requests: no pool of these workers keeps their TTFT, however large."""


@dataclass(slots=True)
class Search:
    """Finds a plan for one sample and some kinds of workers."""

    sample: Sample
    slo: Slo
    attainment: float = 0.95
    """Share of requests that must keep both objectives."""
    max_workers: int = 256
    max_trials: int = 12
    """Of each kind of worker."""
    note: Callable[[Trial], None] = lambda trial: None
    """Hears of each trial."""
    _trials: list[Trial] = field(default_factory=list)
    _chains: PromptChains = field(default_factory=PromptChains)

    def run(self, profiles: tuple[Profile, ...]) -> Plan:
        """Searches all kinds and takes the plan of the fewest GPUs.

        Raises:
            ConfigError: no request of the sample fits a worker.
        """
        best: Trial | None = None
        for profile in profiles:
            found = self._search(coarse(profile))
            if found is not None and (best is None or found.num_gpus < best.num_gpus):
                best = found
        frontier: list[Trial] = []
        if best is not None:
            frontier = [
                self._try(best.profile, best.num_prefill, best.num_decode, rate)
                for rate in FRONTIER_RATES
            ]
            frontier = sorted([*frontier, best], key=lambda trial: trial.rate)
        return Plan(
            chosen=best,
            trials=tuple(self._trials),
            frontier=tuple(frontier),
            slo=self.slo,
            attainment=self.attainment,
            sample=self.sample.text,
            hopeless_share=min(
                hopeless_share(self.sample.workload, profile, self.slo.ttft_s)
                for profile in profiles
            ),
        )

    def _search(self, profile: Profile) -> Trial | None:
        workload = self.sample.workload
        _check_fits(workload, profile)
        bounds = lower_bounds(workload, profile)
        num_prefill, num_decode = (max(1, math.ceil(bound * _HEADROOM)) for bound in bounds)
        tried: dict[tuple[int, int], Trial] = {}
        best = self._try_sizes(profile, self._within(num_prefill, num_decode), tried)
        if hopeless_share(workload, profile, self.slo.ttft_s) > 1 - self.attainment:
            return None
        while not self._holds(best):
            too_many = best.num_prefill + best.num_decode >= self.max_workers
            if too_many or len(tried) >= self.max_trials:
                return None
            best = self._try_sizes(profile, self._within(*self._grow(best)), tried)
        return self._shrink(best, tried)

    def _within(self, num_prefill: int, num_decode: int) -> tuple[int, int]:
        """Returns sizes that are not too many, in about the same ratio."""
        total = num_prefill + num_decode
        if total <= self.max_workers:
            return num_prefill, num_decode
        prefill = round(num_prefill * self.max_workers / total)
        prefill = max(1, min(prefill, self.max_workers - 1))
        return prefill, self.max_workers - prefill

    def _shrink(self, best: Trial, tried: dict[tuple[int, int], Trial]) -> Trial:
        """Takes workers away for as long as the objectives are kept."""
        for pair in self._smaller(best):
            if len(tried) >= self.max_trials:
                return best
            if min(pair) < 1 or pair in tried:
                continue
            trial = self._try_sizes(best.profile, pair, tried)
            if self._holds(trial):
                return self._shrink(trial, tried)
        return best

    def _try_sizes(
        self, profile: Profile, sizes: tuple[int, int], tried: dict[tuple[int, int], Trial]
    ) -> Trial:
        if sizes not in tried:
            tried[sizes] = self._try(profile, *sizes, 1.0)
            self._trials.append(tried[sizes])
        return tried[sizes]

    def _grow(self, trial: Trial) -> tuple[int, int]:
        """Enlarges the pool whose objective is missed by more requests; both, if both are."""
        report = trial.report
        misses_ttft = report.ttft_attainment < self.attainment
        misses_tpot = report.tpot_attainment < self.attainment
        if not misses_ttft and not misses_tpot:
            misses_ttft = report.ttft_attainment <= report.tpot_attainment
            misses_tpot = not misses_ttft
        prefill, decode = trial.num_prefill, trial.num_decode
        # A TTFT that is missed while prefill idles waits for room on decode.
        if misses_ttft and report.prefill_utilization < 0.4 < report.decode_utilization:
            misses_tpot = True
        share = 1.5 if report.attainment < self.attainment / 2 else 1.2
        return (
            max(prefill + 1, math.ceil(prefill * share)) if misses_ttft else prefill,
            max(decode + 1, math.ceil(decode * share)) if misses_tpot else decode,
        )

    @staticmethod
    def _smaller(trial: Trial) -> list[tuple[int, int]]:
        """Returns smaller plans to try: first the pool that is less busy, large steps first."""
        prefill, decode = trial.num_prefill, trial.num_decode
        less_prefill = [(prefill - step, decode) for step in _steps(prefill)]
        less_decode = [(prefill, decode - step) for step in _steps(decode)]
        if trial.report.prefill_utilization <= trial.report.decode_utilization:
            return [*less_prefill, *less_decode]
        return [*less_decode, *less_prefill]

    def _holds(self, trial: Trial) -> bool:
        return trial.report.attainment >= self.attainment

    def _try(self, profile: Profile, num_prefill: int, num_decode: int, rate: float) -> Trial:
        workload = self.sample.workload
        if rate != 1.0:
            workload = scale_rate(workload, rate)
        shape = ClusterShape(
            prefill=profile,
            decode=profile,
            num_prefill=num_prefill,
            num_decode=num_decode,
            tpot_slo_s=self.slo.tpot_s,
        )
        report = simulate(
            shape,
            workload,
            self.slo,
            num_warm_up=self.sample.num_warm_up,
            chains=self._chains,
        )
        trial = Trial(
            profile=profile,
            num_prefill=num_prefill,
            num_decode=num_decode,
            rate=rate,
            report=report,
        )
        self.note(trial)
        return trial


def simulate(
    shape: ClusterShape,
    workload: Workload,
    slo: Slo,
    *,
    num_warm_up: int = 0,
    chains: PromptChains | None = None,
) -> Report:
    """Runs a workload through a cluster; the first requests may be left out of the figures."""
    run = Cluster(shape, chains=chains).run(workload)
    begin_s = workload.arrivals[num_warm_up].at_s
    records = [one for one in run.records if one.at_s >= begin_s]
    return make_report(records, run, slo, shape.num_gpus)


def coarse(profile: Profile) -> Profile:
    """Returns a profile with blocks that are simulated faster."""
    return replace(profile, block_size=max(profile.block_size, SIMULATED_BLOCK_TOKENS))


def usable_tokens(profile: Profile) -> int:
    """Returns the tokens of the blocks that a cache holds whole."""
    return profile.kv_tokens - profile.kv_tokens % profile.block_size


def _steps(size: int) -> list[int]:
    large = size // 6
    return [large, 1] if large > 1 else [1]


def _check_fits(workload: Workload, profile: Profile) -> None:
    longest = max(one.num_prompt_tokens + one.num_output_tokens for one in workload.arrivals)
    if longest > usable_tokens(profile):
        raise ConfigError(
            f"trace: the longest request has {longest} tokens, a worker of profile "
            f"{profile.worker_class} holds {usable_tokens(profile)}",
            settings=("trace",),
        )
