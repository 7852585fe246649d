"""Why a request went where it went, and where its time to the first token was spent.

The parts of the critical path sum to the observed time:

    received --router--> dispatched --retries--> dispatched again --queue--> --prefill--> sampled
                                                                  sampled --delivery--> first token

`queue` and `prefill` are the worker's own words; `router`, `retries` and the whole are the router's
clock, and `delivery` is what is left of it: both ways over the wire, and both processes' turns.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pdserve.errors import RequestNotFound
from pdserve.request import RequestId
from router.policy import Choice
from router.timing import RequestTimes

RUNNING = "running"
MAX_PLACEMENTS = 8
"""Of one request; earlier ones are forgotten."""
MAX_EXPLAINED = 4096
"""Requests that have ended and are remembered."""
MAX_NAMESAKES = 32
"""Told of, beside the one that is explained."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedAttempt:
    """One choice, with all that it was made from."""

    attempt: int
    at_s: float
    """Since the request came."""
    choice: Choice


@dataclass(frozen=True, kw_only=True, slots=True)
class PathPart:
    """A stretch of the time to the first token."""

    name: str
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """What is known of one request."""

    request_id: RequestId
    tenant: str
    num_prompt_tokens: int
    state: str
    """`RUNNING`, or how it ended."""
    placements: tuple[PlacedAttempt, ...]
    ttft_s: float | None
    critical_path: tuple[PathPart, ...]
    """Empty before the first token."""
    tpot_s: float | None
    http_request_id: str | None = None
    """X-Request-Id of the HTTP call that it came by."""
    namesakes: tuple[RequestId, ...] = ()
    """If it was found by that: the last others that have the same."""

    @property
    def expected_ttft_s(self) -> float | None:
        """What the last placement promised, as of then; None while nothing is predicted."""
        if not self.placements or not self.placements[-1].choice.table.is_in_seconds:
            return None
        return self.placements[-1].at_s + self.placements[-1].choice.expected.first_token

    def summary(self) -> str:
        """Returns it in one line of plain ASCII."""
        words = [f"{part.name}={part.seconds:.6f}" for part in self.critical_path]
        if self.ttft_s is not None:
            words.append(f"ttft={self.ttft_s:.6f}")
        if self.expected_ttft_s is not None:
            words.append(f"expected_ttft={self.expected_ttft_s:.6f}")
        if self.placements:
            choice = self.placements[-1].choice
            words.append(f"path={choice.path}")
            words.append(f"candidates={len(choice.table.pairs)}")
        return " ".join(words)


class ExplainLog:
    """Remembers the last requests that have ended."""

    def __init__(self, max_requests: int = MAX_EXPLAINED) -> None:
        """Starts empty."""
        self._max_requests = max_requests
        self._ended: OrderedDict[RequestId, Explanation] = OrderedDict()

    def add(self, explanation: Explanation) -> None:
        """Takes a request that has ended; one of the same id is replaced."""
        self._ended.pop(explanation.request_id, None)
        self._ended[explanation.request_id] = explanation
        if len(self._ended) > self._max_requests:
            self._ended.popitem(last=False)

    def find(self, request_id: RequestId, tenant: str) -> Explanation | None:
        """Returns what is known of a tenant's request; None if it is not, or another tenant's."""
        found = self._ended.get(request_id)
        return found if found is not None and found.tenant == tenant else None

    def of_http_call(self, http_request_id: str, tenant: str) -> list[Explanation]:
        """Returns a tenant's requests that came by HTTP calls of this name, in order of their end.

        Clients may name any number of calls alike, and a call may bring several requests.
        """
        return [
            one
            for one in self._ended.values()
            if one.http_request_id == http_request_id and one.tenant == tenant
        ]


def choose_latest(alike: Sequence[Explanation]) -> Explanation:
    """Returns the last of the requests of one X-Request-Id, and who else there is.

    Raises:
        RequestNotFound: there is none.
    """
    if not alike:
        raise RequestNotFound("no request of this id, or of this X-Request-Id, is remembered")
    *others, latest = alike
    return replace(latest, namesakes=tuple(one.request_id for one in others[-MAX_NAMESAKES:]))


def find_critical_path(
    times: RequestTimes, placements: Sequence[PlacedAttempt]
) -> tuple[PathPart, ...]:
    """Returns the stretches from a request's arrival to its first token; none before it."""
    ttft_s = times.ttft_s
    before = [placed for placed in placements if ttft_s is not None and placed.at_s <= ttft_s]
    if ttft_s is None or not before:
        return ()
    router_s, last = placements[0].at_s, before[-1]
    stages = times.stages_of(last.attempt)
    rest_s = ttft_s - last.at_s
    # A worker's clock runs as fast as ours, but it may round, or begin a stage twice.
    queue_s = min(stages.queue_s, rest_s)
    prefill_s = min(stages.prefill_s, rest_s - queue_s)
    seconds = {
        "router": router_s,
        "retries": last.at_s - router_s,
        "queue": queue_s,
        "prefill": prefill_s,
        "delivery": rest_s - queue_s - prefill_s,
    }
    return tuple(PathPart(name=name, seconds=value) for name, value in seconds.items())
