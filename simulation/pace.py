"""How long steps take on one worker, and how long many of them take at once.

Each step of a run takes every sequence on by one token, so the KV that steps read grows by the
number of sequences. A decode step's time is linear in it, so the times of a run are an arithmetic
series:

    step i (from 0)   first_s + i * growth_s
    k steps           k * first_s + growth_s * k * (k - 1) / 2
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from pdserve.engine.batch import SequenceSlice
from pdserve.predictor.profile import Profile


@dataclass(frozen=True, slots=True)
class RunTime:
    """The times of steps without any event between them."""

    first_s: float
    growth_s: float

    def step_s(self, index: int) -> float:
        """Returns how long one of the steps takes, the first being 0."""
        return self.first_s + self.growth_s * index

    def total_s(self, num_steps: int) -> float:
        """Returns how long so many steps take."""
        return num_steps * self.first_s + self.growth_s * num_steps * (num_steps - 1) / 2

    def num_within(self, seconds: float, max_steps: int) -> int:
        """Returns how many whole steps end within a time."""
        if self.growth_s > 0:
            half = self.first_s - self.growth_s / 2
            root = math.sqrt(half * half + 2 * self.growth_s * max(seconds, 0.0))
            guess = (root - half) / self.growth_s
        else:
            guess = seconds / self.first_s
        steps = max(0, min(int(guess), max_steps))
        # The estimate may be off by one where a step ends at this very time.
        if steps < max_steps and self.total_s(steps + 1) <= seconds:
            return steps + 1
        return steps - 1 if steps and self.total_s(steps) > seconds else steps

    def after(self, num_steps: int) -> "RunTime":
        """Returns the run that is left when so many steps have ended."""
        return RunTime(self.first_s + self.growth_s * num_steps, self.growth_s)


class Pace:
    """A profile's laws, as fast or as slow as this worker is now."""

    def __init__(self, profile: Profile) -> None:
        """Is as fast as the profile says."""
        self._profile = profile
        self.slowness = 1.0
        """2 doubles all times."""

    def run_time(self, num_sequences: int, num_kv_tokens: int) -> RunTime:
        """Returns the times of decode steps from now on."""
        first_s = self._profile.decode_step_s(num_sequences, num_kv_tokens)
        growth_s = self._profile.decode[2] * num_sequences
        return RunTime(first_s * self.slowness, growth_s * self.slowness)

    def step_s(self, slices: Iterable[SequenceSlice]) -> float:
        """Returns the time of any step: chunks of prompts, running sequences, or both.

        What both laws say of a step by itself counts once, the larger of the two.
        """
        p0, p1, p2 = self._profile.prefill
        d0, d1, d2 = self._profile.decode
        chunks_s = running_s = 0.0
        has_chunks = has_running = False
        for part in slices:
            count, context = part.num_tokens, part.start
            if count == 1 and part.output_index is not None and context:
                running_s += d1 + d2 * (context + 1)
                has_running = True
            else:
                chunks_s += p1 * count + p2 * count * (context + count / 2)
                has_chunks = True
        fixed_s = max(p0 if has_chunks else 0.0, d0 if has_running else 0.0)
        return (fixed_s + chunks_s + running_s) * self.slowness
