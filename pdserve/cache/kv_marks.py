"""Points in a device's work from which on KV is there: frames leave while later layers go on."""

from typing import Protocol


class KvMark(Protocol):
    """A point in the work of a step."""

    def is_reached(self) -> bool:
        """Says whether the device has been there.

        Raises:
            DeviceFault: its work failed.
        """
        ...


class KvMarks(Protocol):
    """What a rank marks in its steps, which all ranks of a replica number alike."""

    @property
    def newest(self) -> int:
        """The number of the step that was launched last."""
        ...

    def find(self, step: int, end_layer: int) -> KvMark | None:
        """Returns the point from which on a step's KV is there, in layers up to one of the model.

        Args:
            step: one that is in flight, or has ended.
            end_layer: exclusive; this rank has the layer before it.

        Returns:
            None when the step has long ended.
        """
        ...
