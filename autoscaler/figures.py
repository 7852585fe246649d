"""What an autoscaler sees, and what it says: plain data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pdserve.predictor.predictor import FitQuality, Sample
from pdserve.request import Incarnation, Role


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerFigures:
    """One replica as of now."""

    worker_id: str
    role: Role
    is_serving: bool
    """It takes work; False while it starts, and while nothing is heard of it."""
    is_draining: bool = False
    is_heard: bool = False
    """The router has heard from it, in its present role and life, that it is ready."""
    worker_class: str = ""
    """As it registered; empty while it has not."""
    queued_tokens: int = 0
    """Prompt tokens that wait there to be computed."""
    num_waiting: int = 0
    num_running: int = 0
    num_held: int = 0
    """Prompts that were computed and wait for a decode replica."""
    used_blocks: int = 0
    """That sequences hold or reserved; what only the prefix cache holds is free."""
    reserved_blocks: int = 0
    """Of these, those that KV is arriving in, or will: their sequences do not run yet."""
    total_blocks: int = 0
    block_size: int = 16
    max_num_seqs: int = 256
    chunk_tokens: int = 0
    """Most prompt tokens of a step; 0: not known."""
    life: Incarnation | None = None
    """Whose report this is; None while nothing is heard of it."""
    report: int = 0
    """Its number: one that is shown again says nothing new; 0: this is not what it said itself."""
    samples: tuple[Sample, ...] = ()
    """What some steps and hand-offs took, of this report and of those that nobody has seen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """What the routers have seen: counts since they started, and what waits now."""

    num_arrived: int
    prompt_tokens: int
    """Of all that arrived, without what was found in caches."""
    output_tokens: int
    num_waiting: int = 0
    """Requests that no worker has."""
    waiting_tokens: int = 0
    """Their prompts."""
    oldest_s: float = 0.0
    """Age of the oldest request that waits for others: it has no token, and nobody says that its
    prompt is being computed."""
    num_in_flight: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """All that is known at one time."""

    workers: tuple[WorkerFigures, ...]
    traffic: Traffic | None
    """None while no router answers: nothing is decided."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolNumbers:
    """What a decision about a pool rests on."""

    num_serving: int = 0
    num_starting: int = 0
    num_draining: int = 0
    need: int = 0
    """Replicas for the load as it is and will be when one could have started."""
    survivors_need: int = 0
    """The same with the margin that shrinking asks for, at its largest while settling."""
    reserve: int = 0
    """Of these, what bursts of the last while have needed by their rate; 0: there were none."""
    offered: float = 0.0
    """Seconds of prefill that arrive per second; for decode, sequences per replica at most."""
    backlog_tokens: int = 0
    backlog_s: float | None = None
    """Predicted seconds of work that wait; None while nothing is known of it."""
    oldest_s: float = 0.0
    num_sequences: int = 0
    kv_share: float = 0.0
    tpot_s: float | None = None
    predicted_s: float | None = None
    """Of a mean prompt; for decode, of a step with as many sequences as each replica has now."""
    fit: FitQuality | None = None
    """Of the law that the need rests on; None: it rests on what was measured, or on counts."""
    why: str = ""
    """Which of its terms the need comes from, and what holds it back."""

    @property
    def num_active(self) -> int:
        """Replicas that serve or will."""
        return self.num_serving + self.num_starting


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """A change of a pool, and why."""

    at_s: float
    role: Role
    kind: Literal["grow", "shrink", "flip"]
    """flip: one replica leaves the other pool, which can spare it, for this one."""
    size: int
    """How many replicas the pool is to have."""
    retired: tuple[str, ...] = ()
    """Who leaves: those that only start first, then the least busy. Of the other pool in a flip."""
    numbers: PoolNumbers = field(default_factory=PoolNumbers)

    def describe(self) -> str:
        """Says it in one line."""
        numbers = self.numbers
        leaving = f" without {', '.join(self.retired)}" if self.retired else ""
        backlog = "" if numbers.backlog_s is None else f" ({numbers.backlog_s:.1f} s)"
        tpot = "" if numbers.tpot_s is None else f", TPOT {numbers.tpot_s * 1000:.0f} ms"
        law = describe_law(numbers)
        reserve = f" (reserve {numbers.reserve})" if numbers.reserve else ""
        return (
            f"{self.role}: {self.kind} {numbers.num_active} -> {self.size}{leaving}: "
            f"{numbers.why}; "
            f"{numbers.num_serving} serve, {numbers.num_starting} start, need {numbers.need}, "
            f"survivors {numbers.survivors_need}{reserve}, offered {numbers.offered:.2f}, backlog "
            f"{numbers.backlog_tokens} tokens{backlog}, oldest {numbers.oldest_s:.1f} s, "
            f"{numbers.num_sequences} sequences, KV {numbers.kv_share:.0%}{tpot}"
            f"{law and f', {law}'}"
        )


def describe_law(numbers: PoolNumbers) -> str:
    """Says what the predictor had to say of a pool; nothing while it is not fitted."""
    fit, seconds = numbers.fit, numbers.predicted_s
    if fit is None or seconds is None:
        return ""
    what = "prompt" if fit.kind == "prefill" else "step"
    return (
        f"{what} {seconds * 1000:.0f} ms predicted ({fit.num_samples} samples, "
        f"error {fit.mean_error:.0%})"
    )


Numbers = Mapping[Role, PoolNumbers]
