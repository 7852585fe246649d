"""What a simulated cluster consists of, and what a run of it gives."""

from dataclasses import dataclass, field

from autoscaler.figures import Decision
from autoscaler.settings import ScalingSettings
from pdserve.cache.granule_hash import GRANULE_TOKENS
from pdserve.errors import ConfigError
from pdserve.predictor.profile import Profile
from pdserve.request import Role
from simulation.cache_feed import FLUSH_S
from simulation.record import Record
from simulation.report import GapHistogram
from simulation.spans import Span, replica_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaling:
    """Pools that an autoscaler sizes, and how long what it orders takes."""

    settings: ScalingSettings
    """Ranges and targets."""
    start_s: float = 20.0
    """From the order to start a replica until it serves."""
    cold_s: float = 5.0
    """So long after that its steps are slow."""
    cold_factor: float = 3.0
    """So many times as long as usual."""
    change_s: float = 1.0
    """From the end of a flip's drain until the replica serves in its new pool."""
    drain_timeout_s: float = 60.0
    """A replica that is not empty by then ends; its requests go on elsewhere."""
    profiles: tuple[Profile, ...] | None = None
    """What the autoscaler's predictor begins with; None: with the workers' own profiles."""
    has_samples: bool = True
    """It hears what steps took; False: it has speeds from what comes and waits alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterShape:
    """How many workers of which kind, and how they are set up."""

    prefill: Profile
    decode: Profile
    num_prefill: int
    """0: decode workers compute all prompts themselves, unless the pool may grow."""
    num_decode: int
    scaling: Scaling | None = None
    """Sizes the pools from then on; None: they stay as they are."""
    max_queued: int = 1_000_000
    max_in_flight: int = 1_000_000
    has_waiting_room: bool = True
    """Requests wait in the router for their turn; False: they are dispatched at once."""
    max_waiting: int = 1_000_000
    """Requests in one worker's queue."""
    look_ahead: int = 4
    max_local_tokens: int = 0
    """Uncached prompt tokens that a decode worker may compute itself."""
    cache_events_s: float = FLUSH_S
    """From a change in a cache until the router knows of it."""
    control_s: float = 0.0005
    """A message between two processes."""
    router_s: float = 0.0005
    """What the router does before it dispatches."""
    tpot_slo_s: float | None = None
    """What the router is told of the wanted time per token."""
    ttft_slo_s: float | None = None
    """A request whose first token is predicted later than this is refused; None: none is."""
    hold_s: float = 20.0
    """Computed KV waits so long for a decode worker."""
    skips_steps: bool = True
    """False: every decode step is an event of its own, to check that skipping changes nothing."""
    detect_s: float = 1.0
    """After so long the router knows that a worker died."""

    def __post_init__(self) -> None:
        for profile in (self.prefill, self.decode):
            if GRANULE_TOKENS % profile.block_size:
                raise ConfigError(
                    f"profile {profile.worker_class}: block_size must divide {GRANULE_TOKENS}, "
                    f"the granule of the router's index, got {profile.block_size}"
                )

        scaling = self.scaling
        if scaling is not None and scaling.settings.flips_in_place and not self.is_uniform:
            raise ConfigError("replicas of two profiles cannot change their pool in place")

    @property
    def is_uniform(self) -> bool:
        """Workers of both pools are alike."""
        return self.prefill == self.decode

    @property
    def has_prefill_pool(self) -> bool:
        """Prompts are computed by prefill workers, or wait for one."""
        if self.scaling is None:
            return self.num_prefill > 0
        return self.scaling.settings.prefill.most > 0

    def profile_of(self, role: Role) -> Profile:
        """Returns the profile of a pool's workers."""
        return self.prefill if role is Role.PREFILL else self.decode

    @property
    def num_gpus(self) -> int:
        """Of all replicas at the start."""
        sizes = {Role.PREFILL: self.num_prefill, Role.DECODE: self.num_decode}
        return sum(sizes[role] * self.gpus_of(role) for role in Role)

    def gpus_of(self, role: Role) -> int:
        """Returns the GPUs of a pool's replica; one on a CPU counts as one."""
        return max(self.profile_of(role).num_gpus, 1)


@dataclass(slots=True)
class ClusterRun:
    """What a simulation saw."""

    records: list[Record] = field(default_factory=list)
    gaps: GapHistogram = field(default_factory=GapHistogram)
    busy_s: dict[Role, list[float]] = field(default_factory=lambda: {role: [] for role in Role})
    """How long each worker computed."""
    end_s: float = 0.0
    num_events: int = 0
    num_first_tokens: int = 0
    decisions: list[Decision] = field(default_factory=list)
    """Of the autoscaler, in their order, each with its numbers."""
    spans: list[Span] = field(default_factory=list)
    """Of all replicas of pools that are sized."""

    def worker_s(self, role: Role) -> float:
        """Returns how long all workers of a pool were there, or were paid for."""
        if self.spans:
            return replica_s(self.spans, 0.0, self.end_s)[role]
        return len(self.busy_s[role]) * self.end_s

    @property
    def num_output_tokens(self) -> int:
        """That clients have."""
        return self.num_first_tokens + self.gaps.num_gaps
