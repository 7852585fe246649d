"""Which replicas each pool of a simulated cluster had, and when: what is paid for."""

from collections.abc import Iterable
from dataclasses import dataclass

from pdserve.request import Role, WorkerId


@dataclass(slots=True)
class Span:
    """A replica in one pool: from the order to start it, or to come over, until it was gone."""

    worker_id: WorkerId
    role: Role
    begin_s: float
    end_s: float = float("inf")

    def seconds(self, begin_s: float, end_s: float) -> float:
        """Returns how much of it lies within a time."""
        return max(0.0, min(self.end_s, end_s) - max(self.begin_s, begin_s))


def replica_s(spans: Iterable[Span], begin_s: float, end_s: float) -> dict[Role, float]:
    """Returns the replica seconds of each pool within a time."""
    spent = dict.fromkeys(Role, 0.0)
    for span in spans:
        spent[span.role] += span.seconds(begin_s, end_s)
    return spent


def size_at(spans: Iterable[Span], role: Role, at_s: float) -> int:
    """Returns how many replicas a pool had, those that start or drain counted."""
    return sum(span.role is role and span.begin_s <= at_s < span.end_s for span in spans)
