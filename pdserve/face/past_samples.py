"""The last samples of each kind, for whoever has missed the reports that they came with."""

from collections import deque
from collections.abc import Iterator

from pdserve.rpc.v1 import types_pb2

MAX_SAMPLES_A_KIND = 64
"""Several times as many as a law needs; of three kinds they are some 4 KB."""


class PastSamples:
    """What was reported before the present report."""

    def __init__(self) -> None:
        """Remembers nothing."""
        self._by_kind: dict[str, deque[tuple[int, types_pb2.StepSample]]] = {}

    def add(self, load: types_pb2.WorkerLoad) -> None:
        """Remembers samples of a report that is not the present one any more: copies of them."""
        for sample in load.samples:
            kind = sample.WhichOneof("kind")
            if kind is not None:
                kept = self._by_kind.setdefault(kind, deque(maxlen=MAX_SAMPLES_A_KIND))
                copy = types_pb2.StepSample()
                copy.CopyFrom(sample)
                kept.append((load.report, copy))

    def __iter__(self) -> Iterator[types_pb2.StepSample]:
        """Yields them, of each kind the oldest first."""
        for kept in self._by_kind.values():
            yield from (sample for _, sample in kept)

    def since(self, report: int) -> Iterator[types_pb2.StepSample]:
        """Yields those that came with later reports than this one."""
        for kept in self._by_kind.values():
            yield from (sample for number, sample in kept if number > report)
