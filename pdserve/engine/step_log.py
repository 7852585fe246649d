"""What the last steps took, as samples for a predictor: a few of each kind until they are taken.

Only steps of one kind are of use: one piece of one prompt, or one token for each sequence. Pure.
"""

from collections import deque

from pdserve.engine.batch import StepPlan
from pdserve.predictor.predictor import DecodeSample, PrefillSample

MAX_SAMPLES_A_KIND = 4
"""With two kinds at most in one worker, a report carries eight."""


class StepLog:
    """Keeps the latest samples of each kind. One thread."""

    def __init__(self) -> None:
        """Has none."""
        self._prefills: deque[PrefillSample] = deque(maxlen=MAX_SAMPLES_A_KIND)
        self._decodes: deque[DecodeSample] = deque(maxlen=MAX_SAMPLES_A_KIND)

    def note(self, plan: StepPlan, seconds: float) -> None:
        """Notes a step that has ended, if it is of one kind."""
        first = plan.slices[0]
        if any(part.prompt_targets for part in plan.slices):
            return
        if plan.num_tokens == len(plan.slices) and first.output_index is not None:
            num_kv_tokens = sum(part.end for part in plan.slices)
            self.note_decode(len(plan.slices), num_kv_tokens, seconds)
        elif len(plan.slices) == 1:
            self._prefills.append(
                PrefillSample(
                    num_tokens=first.num_tokens, num_context_tokens=first.start, seconds=seconds
                )
            )

    def note_decode(self, num_sequences: int, num_kv_tokens: int, seconds: float) -> None:
        """Notes a step that took each of some sequences on by one token."""
        self._decodes.append(
            DecodeSample(num_sequences=num_sequences, num_kv_tokens=num_kv_tokens, seconds=seconds)
        )

    def take(self) -> tuple[PrefillSample | DecodeSample, ...]:
        """Returns, once, what was noted since the last call."""
        taken: tuple[PrefillSample | DecodeSample, ...] = (*self._prefills, *self._decodes)
        self._prefills.clear()
        self._decodes.clear()
        return taken
