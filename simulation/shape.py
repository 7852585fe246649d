"""What a simulated cluster consists of, and what a run of it gives."""

from dataclasses import dataclass, field

from pdserve.cache.granule_hash import GRANULE_TOKENS
from pdserve.errors import ConfigError
from pdserve.predictor.profile import Profile
from pdserve.request import Role
from simulation.record import Record
from simulation.report import GapHistogram


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterShape:
    """How many workers of which kind, and how they are set up."""

    prefill: Profile
    decode: Profile
    num_prefill: int
    """0: decode workers compute all prompts themselves."""
    num_decode: int
    max_queued: int = 1_000_000
    max_in_flight: int = 1_000_000
    has_waiting_room: bool = True
    """Requests wait in the router for their turn; False: they are dispatched at once."""
    max_waiting: int = 1_000_000
    """Requests in one worker's queue."""
    look_ahead: int = 4
    max_local_tokens: int = 0
    """Uncached prompt tokens that a decode worker may compute itself."""
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

    @property
    def num_gpus(self) -> int:
        """Of all replicas; a replica on a CPU counts as one."""
        prefill, decode = max(self.prefill.num_gpus, 1), max(self.decode.num_gpus, 1)
        return self.num_prefill * prefill + self.num_decode * decode


@dataclass(slots=True)
class ClusterRun:
    """What a simulation saw."""

    records: list[Record] = field(default_factory=list)
    gaps: GapHistogram = field(default_factory=GapHistogram)
    busy_s: dict[Role, list[float]] = field(default_factory=lambda: {role: [] for role in Role})
    """How long each worker computed."""
    end_s: float = 0.0
    num_events: int = 0
