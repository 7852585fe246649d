"""CUDA graphs of whole forward passes: hundreds of launches become one.

    first the largest shape, then smaller ones; all share one memory pool, since they never run at
    once and nothing of theirs outlives a step

The tensors a graph reads and writes are the runner's own, at fixed places; what changes from step
to step (rows, lengths, tables) is read on the device.
"""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.cuda.device import Device
from pdserve.cuda.step_shape import StepShape

Compute = Callable[[StepShape], Tensor | None]
"""Launches everything from a step's inputs to its logits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureReport:
    """What capturing cost."""

    num_graphs: int
    seconds: float
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    logits: Tensor | None


class GraphSet:
    """Captured shapes. Used by the engine's thread."""

    def __init__(
        self, device: Device, compute: Compute, send_padding: Callable[[StepShape], None]
    ) -> None:
        """Captures nothing yet; `send_padding` makes a step's inputs harmless."""
        self._device = device
        self._send_padding = send_padding
        self._compute = compute
        self._graphs: dict[StepShape, _Graph] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.is_cuda else None

    @property
    def shapes(self) -> tuple[StepShape, ...]:
        """What is captured."""
        return tuple(self._graphs)

    def capture(self, shapes: Sequence[StepShape]) -> CaptureReport:
        """Captures shapes in their order."""
        started_s = time.perf_counter()
        before = self._device.free_bytes()
        # A graph of old that the collector finds while another is captured would break the capture.
        gc.collect()
        gc.disable()
        try:
            for shape in shapes:
                self._capture(shape)
        finally:
            gc.enable()
        self._device.synchronize()
        return CaptureReport(
            num_graphs=len(shapes),
            seconds=time.perf_counter() - started_s,
            num_bytes=before - self._device.free_bytes(),
        )

    def drop(self) -> None:
        """Gives up all graphs, and the memory that they hold."""
        self._graphs.clear()

    def _capture(self, shape: StepShape) -> None:
        # Compiles kernels and makes libraries allocate what a capture must not.
        self._send_padding(shape)
        self._compute(shape)
        self._device.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=torch.cuda.current_stream()):
            logits = self._compute(shape)
        self._graphs[shape] = _Graph(graph, logits)

    def replay(self, shape: StepShape) -> Tensor | None:
        """Launches a captured shape; returns its logits."""
        captured = self._graphs[shape]
        captured.graph.replay()
        return captured.logits
