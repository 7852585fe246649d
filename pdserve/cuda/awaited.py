"""Where on the device the tokens are that recent steps sampled, for steps that await them. Pure.

A step writes its tokens into the next of `num_steps` rows of ids; an entry is good until its row is
written again.
"""

from collections import deque
from collections.abc import Iterable

from pdserve.engine.batch import StepPlan
from pdserve.request import RequestId


class AwaitedIds:
    """The ids of the last steps, by request. Steps are numbered from 1 on."""

    def __init__(self, num_steps: int, max_rows: int) -> None:
        """Nothing was sampled yet."""
        self._num_steps = num_steps
        self._max_rows = max_rows
        self._numbers: dict[RequestId, int] = {}
        self._steps: deque[tuple[int, tuple[RequestId, ...]]] = deque()
        self.indices: dict[RequestId, int] = {}
        """Where each request's newest token is among all rows of ids."""

    def row_of(self, number: int) -> int:
        """Returns which row of ids a step writes."""
        return number % self._num_steps

    def newest(self, plan: StepPlan) -> int | None:
        """Returns the last step that a plan awaits a token of; None if it awaits none."""
        awaited = (part.request.request_id for part in plan.slices if part.awaits_token)
        return max((self._numbers[request_id] for request_id in awaited), default=None)

    def note(self, number: int, rows: Iterable[tuple[RequestId, int]]) -> None:
        """Notes which rows of a step sample for which requests; the oldest step is forgotten."""
        if len(self._steps) == self._num_steps:
            self._forget(*self._steps.popleft())
        base = self.row_of(number) * self._max_rows
        sampled = {request_id: base + row for request_id, row in rows}
        self.indices |= sampled
        self._numbers |= dict.fromkeys(sampled, number)
        self._steps.append((number, tuple(sampled)))

    def _forget(self, number: int, request_ids: Iterable[RequestId]) -> None:
        for request_id in request_ids:
            if self._numbers[request_id] == number:
                del self._numbers[request_id], self.indices[request_id]
