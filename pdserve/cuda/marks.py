"""Points in a stream's work, and those behind groups of layers in the newest steps."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from pdserve.cache.kv_marks import KvMark
from pdserve.cuda.faults import DeviceFault


class TrafficMark:
    """A point in a stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        """Records the present end of the stream."""
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def is_reached(self) -> bool:
        """Says whether the work before it is done.

        Raises:
            DeviceFault: the device failed.
        """
        try:
            return bool(self.event.query())  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise DeviceFault(str(error).splitlines()[0]) from error

    def wait(self) -> None:
        """Waits until the work before it is done."""
        self.event.synchronize()


def mark_steps() -> TrafficMark:
    """Marks the present end of the calling thread's stream."""
    return TrafficMark(torch.cuda.current_stream())


@dataclass(slots=True)
class _Step:
    number: int
    marks: list[tuple[int, KvMark]] = field(default_factory=list)
    """By the layer, exclusive, up to which KV is there: the first layers first."""


class LayerMarks:
    """The `KvMarks` of a runner. Its thread alone."""

    def __init__(
        self, make_mark: Callable[[], KvMark], layers: range, layers_apart: int, max_steps: int
    ) -> None:
        """Has no step yet.

        Args:
            make_mark: marks the present end of the steps' work.
            layers: of the model, on this rank.
            layers_apart: a mark stands behind every so many layers of the model, and the last.
            max_steps: in flight.
        """
        self._make_mark = make_mark
        self._layers = layers
        self._layers_apart = layers_apart
        self._steps: deque[_Step] = deque(maxlen=max_steps + 1)

    @property
    def newest(self) -> int:
        """The number of the step that was launched last."""
        return self._steps[-1].number

    def begin(self, step: int) -> None:
        """Notes that a step is launched now."""
        self._steps.append(_Step(step))

    def note_stored(self, end_layer: int) -> None:
        """Marks, if a mark is wanted here, that KV of all layers up to one is stored."""
        if end_layer % self._layers_apart == 0 or end_layer == self._layers.stop:
            self._steps[-1].marks.append((end_layer, self._make_mark()))

    def note_all_stored(self) -> None:
        """Marks that KV of all layers is stored."""
        self.note_stored(self._layers.stop)

    def find(self, step: int, end_layer: int) -> KvMark | None:
        """Returns the mark behind a layer; None when the step has long ended."""
        found = next((one for one in self._steps if one.number == step), None)
        if found is None:
            assert step < self.newest, f"step {step} is not launched yet"
            return None
        return next(mark for end, mark in found.marks if end >= end_layer)
