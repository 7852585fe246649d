"""How far the KV of a prompt is: computed, or by a step that is under way on its device. Pure."""

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Step:
    number: int
    num_tokens: int
    """Leading tokens whose KV is there once it has ended."""


class ComputedKv:
    """The leading tokens of one prompt whose KV is there, or will be, in the order of the steps."""

    def __init__(self) -> None:
        """Starts with nothing."""
        self._num_computed = 0
        self._steps: deque[_Step] = deque()

    @property
    def num_expected(self) -> int:
        """Tokens whose KV is there once all steps in flight have ended."""
        return self._steps[-1].num_tokens if self._steps else self._num_computed

    def launch(self, num_tokens: int, step: int) -> None:
        """Notes a step in flight, and up to where it computes the prompt."""
        self._steps.append(_Step(step, num_tokens))

    def end(self, num_tokens: int) -> None:
        """Notes that KV of so many tokens is there."""
        self._num_computed = max(self._num_computed, num_tokens)
        while self._steps and self._steps[0].num_tokens <= self._num_computed:
            self._steps.popleft()

    def step_for(self, num_tokens: int) -> int | None:
        """Returns the step in flight that completes so many tokens; None: they are there."""
        if num_tokens <= self._num_computed:
            return None
        return next(step.number for step in self._steps if step.num_tokens >= num_tokens)
