"""The ranks of one replica as threads of this process: what they exchange in a step."""

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pdserve.config.engine import EngineConfig
from pdserve.layers.parallel import Arriving, Shard
from pdserve.models.folder import geometry_of, read_model_config

TIMEOUT_S = 30.0


class ThreadGroup:
    """A `TensorGroup` of threads."""

    def __init__(self, rank: int, slots: list[Tensor | None], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.size = len(slots)
        self._slots = slots
        self._barrier = barrier

    def _exchange(self, x: Tensor) -> list[Tensor]:
        self._slots[self.rank] = x.clone()
        self._barrier.wait(TIMEOUT_S)
        parts = [part for part in self._slots if part is not None]
        self._barrier.wait(TIMEOUT_S)
        return parts

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        parts = self._exchange(x)
        assert [part.shape[1] for part in parts] == list(widths)
        return torch.cat(parts, dim=1)

    def sum(self, x: Tensor) -> Tensor:
        return torch.stack(self._exchange(x)).sum(0)


@dataclass
class ThreadLogits:
    """An `Arriving` of threads."""

    take: Callable[[], Tensor]
    taken: Tensor | None = None

    @property
    def is_here(self) -> bool:
        return self.taken is not None

    def wait(self) -> Tensor:
        if self.taken is None:
            self.taken = self.take()
        return self.taken


class ThreadStages:
    """A `StageLink` of threads; `boxes` hold each rank's activations, the last one logits."""

    def __init__(self, rank: int, width: int, boxes: "list[queue.SimpleQueue[Tensor]]") -> None:
        self._rank = rank
        self._width = width
        self._boxes = boxes

    def receive(self, num_rows: int, num_columns: int) -> Tensor:
        return self._take(self._boxes[self._rank], num_rows, num_columns)

    def send(self, x: Tensor) -> None:
        self._boxes[self._rank + self._width].put(x.clone())

    def expect_logits(self, num_rows: int, num_columns: int) -> Arriving:
        return ThreadLogits(lambda: self._take(self._boxes[-1], num_rows, num_columns))

    def send_logits(self, logits: Tensor) -> None:
        self._boxes[-1].put(logits.clone())

    def _take(self, box: "queue.SimpleQueue[Tensor]", num_rows: int, num_columns: int) -> Tensor:
        x = box.get(timeout=TIMEOUT_S)
        assert x.shape == (num_rows, num_columns)
        return x


def make_shards(folder: Path, engine: EngineConfig) -> list[Shard | None]:
    """Returns what each rank's model is told of its part; None for an only rank."""
    config = read_model_config(folder)
    geometry = geometry_of(config, engine)
    if geometry.num_ranks == 1:
        return [None]
    tensor, stages = engine.tensor_parallel, engine.pipeline_parallel
    slots: list[list[Tensor | None]] = [[None] * tensor for _ in range(stages)]
    barriers = [threading.Barrier(tensor) for _ in range(stages)]
    boxes: list[queue.SimpleQueue[Tensor]] = [
        queue.SimpleQueue() for _ in range(geometry.num_ranks + 1)
    ]
    return [
        Shard(
            whole=config,
            part=part,
            tensor_parallel=tensor,
            num_stages=stages,
            is_exact=engine.dtype == "float32",
            group=(
                ThreadGroup(part.tensor_rank, slots[part.stage], barriers[part.stage])
                if tensor > 1
                else None
            ),
            stages=ThreadStages(part.rank, tensor, boxes) if stages > 1 else None,
        )
        for part in geometry.parts
    ]
