"""The prompts that wait at one worker, and which of them its present step computes.

Workers fill steps of `chunk_tokens` with prompts in the order in which they came; the last one of a
step may be cut, and goes on in the next. All that a step completes is told at its end, one after
another. So the first end that is told begins the next step:

    ending         present step           rest
    [done, done]   [whole, whole, part|   ...part, whole, whole]

What joins a step under way (the last chunk of a long prompt has room) is not known here, and counts
as rest until it is told.
"""

import math
from collections.abc import Iterator

from pdserve.request import RequestId

Terms = tuple[float, float, float]
"""Of the predictor's law: steps, tokens, tokens x context."""

NO_TERMS: Terms = (0.0, 0.0, 0.0)


class PromptQueue:
    """One worker's prompts of one front."""

    def __init__(self, chunk_tokens: float) -> None:
        """Starts empty; no chunk is known of a worker that is not here: its steps have no end."""
        self._chunk_tokens = chunk_tokens
        self._prompts: dict[RequestId, Terms] = {}
        self._ending: set[RequestId] = set()
        """Completed by the last step, and not told yet."""
        self._whole: set[RequestId] = set()
        """Completed by the present step."""
        self._cut: tuple[RequestId, float] | None = None
        """Not completed by it, and how many of its tokens will be computed at its end."""
        self.head: Terms = NO_TERMS
        """Of the present step; the first term counts its chunks."""
        self.done: Terms = NO_TERMS
        """Of the first prompt: what earlier steps computed."""
        self.since_s = 0.0
        """When the present step began."""

    def __len__(self) -> int:
        return len(self._prompts)

    def __iter__(self) -> Iterator[Terms]:
        return iter(self._prompts.values())

    def push(self, request_id: RequestId, terms: Terms, now_s: float) -> None:
        """Adds a prompt at the end; an idle worker begins with it."""
        self._prompts[request_id] = terms
        if len(self._prompts) == 1:
            self._begin_step(now_s)

    def restart(self, chunk_tokens: float, now_s: float) -> None:
        """Begins anew: the worker has just come, and only the first prompt is surely computed."""
        self._chunk_tokens = chunk_tokens
        self._ending.clear()
        self._cut = None
        self._begin_step(now_s, max_prompts=1)

    def pop(self, request_id: RequestId, now_s: float) -> bool:
        """Takes a prompt out: it is computed, or will not be.

        Returns whether the present step is another one now.
        """
        del self._prompts[request_id]
        if request_id in self._ending:
            self._ending.remove(request_id)
            # If it is told late, the step began late.
            self.since_s = now_s
            if self.head == NO_TERMS:
                self._begin_step(now_s)
            return True
        if request_id in self._whole:
            self._whole.remove(request_id)
            self._ending |= self._whole
            self._begin_step(now_s)
            return True
        if self._cut is not None and self._cut[0] == request_id:
            self._cut = None
        return False

    def _begin_step(self, now_s: float, max_prompts: float = math.inf) -> None:
        """Fills the next step, which begins with what the last one has left of its last prompt."""
        cut, self._cut = self._cut, None
        self._whole.clear()
        self.since_s, self.done = now_s, NO_TERMS
        steps = tokens = pairs = room = 0.0
        for request_id, (_, num_tokens, num_pairs) in self._prompts.items():
            if request_id in self._ending:
                continue
            context, begun = num_pairs / num_tokens - num_tokens / 2, 0.0
            if not steps:
                if cut is not None and cut[0] == request_id:
                    begun = cut[1]
                    self.done = (0.0, begun, begun * (context + begun / 2))
                steps = float(math.ceil((num_tokens - begun) / self._chunk_tokens) or 1)
                room = steps * self._chunk_tokens
            end = min(num_tokens, begun + room)
            tokens += end - begun
            pairs += (end - begun) * (context + (begun + end) / 2)
            room -= end - begun
            if end < num_tokens:
                self._cut = request_id, end
            else:
                self._whole.add(request_id)
            if room <= 0 or len(self._whole) >= max_prompts:
                break
        self.head = (steps, tokens, pairs)
