"""The last samples of each kind, for a router that starts anew and would have to learn again."""

from collections import deque
from collections.abc import Iterable, Iterator

from pdserve.rpc.v1 import types_pb2

MAX_SAMPLES_A_KIND = 64
"""Several times as many as a law needs; of three kinds they are some 4 KB."""


class PastSamples:
    """What was reported before the present report."""

    def __init__(self) -> None:
        """Remembers nothing."""
        self._by_kind: dict[str, deque[types_pb2.StepSample]] = {}

    def add(self, samples: Iterable[types_pb2.StepSample]) -> None:
        """Remembers samples of a report that is not the present one any more: copies of them."""
        for sample in samples:
            kind = sample.WhichOneof("kind")
            if kind is not None:
                kept = self._by_kind.setdefault(kind, deque(maxlen=MAX_SAMPLES_A_KIND))
                copy = types_pb2.StepSample()
                copy.CopyFrom(sample)
                kept.append(copy)

    def __iter__(self) -> Iterator[types_pb2.StepSample]:
        """Yields them, of each kind the oldest first."""
        for kept in self._by_kind.values():
            yield from kept
