"""A runner whose memory holds NaN wherever a step has no business to read."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pdserve.cache.kv_tensors import KvTensors
from pdserve.engine.batch import PendingStep, StepPlan, StepRunner


class PoisonedRunner:
    """A `StepRunner` that spoils memory before each step.

    All KV is NaN at first. Before a step the slots behind the end of each of its sequences become
    NaN again, whoever wrote there before, and so do all buffers that a step fills by itself, rows
    beyond the batch included.
    """

    def __init__(self, runner: StepRunner, kv: KvTensors, buffers: Sequence[Tensor] = ()) -> None:
        """Spoils all KV."""
        self._runner = runner
        self._kv = kv
        self._buffers = buffers
        self.num_spoiled = 0
        """Slots that were spoiled again, so far."""
        for part in self._parts():
            part.fill_(torch.nan)
        if kv.device.type == "cuda":
            # Frames land on a stream of their own.
            torch.cuda.synchronize()

    @property
    def max_steps_in_flight(self) -> int:
        return self._runner.max_steps_in_flight

    def launch(self, plan: StepPlan) -> PendingStep:
        for buffer in self._buffers:
            spoil(buffer)
        size = self._kv.geometry.block_size
        slots = [
            part.block_ids[place // size] * size + place % size
            for part in plan.slices
            for place in range(part.end, len(part.block_ids) * size)
        ]
        if slots:
            index = torch.tensor(slots).to(self._kv.device)
            for part in self._parts():
                part.index_fill_(0, index, torch.nan)
        self.num_spoiled += len(slots)
        return self._runner.launch(plan)

    def _parts(self) -> list[Tensor]:
        layers = range(len(self._kv.part.layers))
        return [part for layer in layers for part in self._kv.layer(layer)]


def spoil(buffer: Tensor) -> None:
    """Fills with NaN; bytes become the NaN of any float type."""
    if buffer.dtype == torch.uint8:
        buffer.fill_(0xFF)
    else:
        buffer.fill_(torch.nan)
