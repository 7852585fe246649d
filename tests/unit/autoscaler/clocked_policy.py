"""A scaling policy with a clock of its own, and figures to show it."""

from dataclasses import replace

from autoscaler.figures import Decision, Reading, Traffic, WorkerFigures
from autoscaler.policy import ScalingPolicy
from autoscaler.settings import PoolRange, ScalingSettings
from pdserve.predictor.predictor import Predictor
from pdserve.predictor.profile import Profile
from pdserve.request import Role

PROFILE = Profile(
    worker_class="model",
    prefill=(0.01, 0.0002, 0.0),
    decode=(0.02, 0.0006, 0.0),
    transfer=(0.001, 1e-10),
    kv_bytes_per_token=1000,
    kv_tokens=100_000,
)
SETTINGS = ScalingSettings(
    prefill=PoolRange(least=1, most=8), decode=PoolRange(least=1, most=8), tpot_s=0.05
)
CALM = Traffic(num_arrived=0, prompt_tokens=0, output_tokens=0)
BUSY = Traffic(num_arrived=0, prompt_tokens=0, output_tokens=0, num_in_flight=9)


def worker(name: str, *, is_serving: bool = True, **fields: object) -> WorkerFigures:
    figures = WorkerFigures(
        worker_id=name,
        role=Role(name.partition("-")[0]),
        is_serving=is_serving,
        worker_class=PROFILE.worker_class,
        total_blocks=1000,
        max_num_seqs=64,
    )
    return replace(figures, **fields)  # type: ignore[arg-type]


PAIR = (worker("prefill-0"), worker("decode-0"))


class Clocked:
    """A policy and the time."""

    def __init__(self, settings: ScalingSettings = SETTINGS, *, is_fitted: bool = True) -> None:
        self.policy = ScalingPolicy(settings, Predictor([PROFILE] if is_fitted else []))
        self.now_s = 0.0

    def see(
        self, *workers: WorkerFigures, traffic: Traffic | None = BUSY, seconds: float = 1.0
    ) -> list[Decision]:
        """Shows the same figures once a second, and returns all that was decided."""
        found: list[Decision] = []
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s += 1.0
            found += self.policy.decide(self.now_s, Reading(workers=workers, traffic=traffic))
        return found


def kinds(decisions: list[Decision]) -> list[tuple[str, Role, int]]:
    return [(one.kind, one.role, one.size) for one in decisions]
