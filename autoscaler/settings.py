"""What an autoscaler is to reach, and within which bounds."""

from dataclasses import dataclass, field

from pdserve.errors import ConfigError
from pdserve.request import Role

MOST_REPLICAS = 100_000
"""Beyond any cluster; what is typed by mistake is refused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolRange:
    """How small and how large a pool may be."""

    least: int = 1
    """0 lets an idle pool go; the first waiting request brings it back."""
    most: int = 1

    def __post_init__(self) -> None:
        """Checks the bounds.

        Raises:
            ConfigError: one of them is out of range.
        """
        if not 0 <= self.least <= self.most:
            raise ConfigError(f"a pool must have 0 <= MIN <= MAX, got {self.least}..{self.most}")
        if self.most > MOST_REPLICAS:
            raise ConfigError(f"a pool must have at most {MOST_REPLICAS}, got {self.most}")

    @property
    def is_fixed(self) -> bool:
        """True where there is nothing to decide."""
        return self.least == self.most

    def clamp(self, count: int) -> int:
        """Returns the allowed size next to the wanted one."""
        return min(max(count, self.least), self.most)

    def moved(self, change: int, size: int) -> "PoolRange":
        """Returns the bounds of a pool that somebody has made larger or smaller by hand.

        Args:
            change: replicas that have joined; below 0, that have left.
            size: of the pool before. What is fixed moves along, a range is stretched to hold it.

        Raises:
            ConfigError: the pool would be too large.
        """
        if self.is_fixed:
            # Nobody gives the last one away.
            count = max(self.least + change, 1)
            return PoolRange(least=count, most=count)
        size = max(size + change, 0)
        return PoolRange(least=min(self.least, size), most=max(self.most, size))


def parse_range(text: str) -> PoolRange:
    """Reads `3` or `1..3`.

    Raises:
        ConfigError: it is neither.
    """
    first, dots, last = text.partition("..")
    try:
        least = int(first)
        most = int(last) if dots else least
    except ValueError:
        raise ConfigError(
            f"a pool's size must be a number or MIN..MAX, got {text[:64]!r}"
        ) from None
    return PoolRange(least=least, most=most)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingSettings:
    """Targets and patience of an autoscaler."""

    prefill: PoolRange = field(default_factory=PoolRange)
    """0..0: decode replicas prefill."""
    decode: PoolRange = field(default_factory=PoolRange)
    most_in_all: int | None = None
    """Of both pools together, as where they share GPUs; None: no such bound."""
    ttft_s: float = 1.0
    """Wanted time to first token."""
    tpot_s: float = 0.1
    """Wanted time per output token."""
    tail: float = 0.05
    """Share of requests that may wait longer than the target leaves them."""
    utilization: float = 0.8
    """A prefill replica is busy for no more than this share of its time."""
    kv_share: float = 0.8
    """Sequences take no more than this share of a decode replica's KV."""
    kv_full_share: float = 0.95
    """From here on decode is what others wait for."""
    queue_tokens: int = 2048
    """Prompt tokens that may wait for each replica while nobody knows how long they take."""
    catch_up_s: float = 20.0
    """A backlog is to be gone so long after new replicas came."""
    rate_window_s: float = 30.0
    """Rates are means over this."""
    settle_s: float = 300.0
    """A pool shrinks to the largest need of this long, so that it need not grow again at once.

    Doubled each time that it had to, up to four times this; forgotten when a size lasted so long.
    """
    burst_memory_s: float = 1200.0
    """So long after requests came faster than replicas can start, a pool keeps what they needed by
    their rate: the next burst finds it there. 0: off.
    """
    confirm_s: float = 10.0
    """A need from mere rates must last so long; what waits already is acted on at once."""
    overdue_s: float = 3.0
    """So long must requests be past their target before a pool grows for nothing but that."""
    shrink_margin: float = 0.15
    """Survivors must still fit with so much more load."""
    grow_pause_s: float = 5.0
    """Between two orders to grow."""
    shrink_pause_s: float = 60.0
    """Between two orders to shrink."""
    idle_s: float = 300.0
    """Without any request for this long, a pool goes to its least size."""
    lost_s: float = 15.0
    """One that served and is not heard of counts for this long still: the registry may be away."""
    flips_in_place: bool = False
    """A replica can change its pool with its weights loaded: it has only to drain."""
    change_s: float = 1.0
    """How long a replica takes to change its pool once it has drained."""
    leave_by_number: bool = False
    """The highest number leaves first, whoever that is: Kubernetes takes no other of a StatefulSet.
    """
    start_s: float = 20.0
    """How long a replica takes to start, until one did."""
    drain_s: float = 10.0
    """How long a replica takes to drain, until one did."""

    def __post_init__(self) -> None:
        """Checks targets.

        Raises:
            ConfigError: one of them is out of range.
        """
        if self.decode.most < 1:
            raise ConfigError("the decode pool must be allowed at least one replica")
        for name in ("ttft_s", "tpot_s", "catch_up_s", "rate_window_s"):
            value = {
                "ttft_s": self.ttft_s,
                "tpot_s": self.tpot_s,
                "catch_up_s": self.catch_up_s,
                "rate_window_s": self.rate_window_s,
            }[name]
            if not value > 0:
                raise ConfigError(f"{name} must be above 0, got {value:g}", settings=(name,))
        for name, value in (
            ("tail", self.tail),
            ("utilization", self.utilization),
            ("kv_share", self.kv_share),
        ):
            if not 0 < value < 1:
                raise ConfigError(
                    f"{name} must be between 0 and 1, got {value:g}", settings=(name,)
                )
        least = self.prefill.least + self.decode.least
        if self.most_in_all is not None and self.most_in_all < least:
            raise ConfigError(
                f"most_in_all must be at least {least}, got {self.most_in_all}",
                settings=("most_in_all",),
            )

    @property
    def can_be_empty(self) -> bool:
        """A pool that can have replicas may go down to none."""
        return any(one.least == 0 and one.most > 0 for one in (self.prefill, self.decode))

    def range_of(self, role: Role) -> PoolRange:
        """Returns the bounds of a pool."""
        return self.prefill if role is Role.PREFILL else self.decode
