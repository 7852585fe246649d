"""Stages joined by wires, in one process: what is sent when, and into which places."""

from collections import deque
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pdserve.cuda.device import Device
from pdserve.cuda.far_stages import FarStages
from tests.support.tiny_models import make_tiny_llama
from tests.unit.cuda.test_stage_memory import ROOM, buffers_of, shard_of


class QueueWire:
    """Both ends of a wire in one process."""

    def __init__(self) -> None:
        self.payloads: deque[Tensor] = deque()

    def send(self, payload: Tensor) -> None:
        assert payload.is_contiguous()
        self.payloads.append(payload.clone())

    def receive(self, slot: Tensor, free: object) -> None:
        payload = self.payloads.popleft()
        assert slot.shape == payload.shape, "both ends must know the size"
        slot.copy_(payload)

    def close(self) -> None:
        self.payloads.clear()


@pytest.fixture
def stages(tmp_path: Path) -> tuple[FarStages, FarStages]:
    make_tiny_llama(tmp_path / "model")
    forth, back = QueueWire(), QueueWire()
    device = Device(torch.device("cpu"))
    first, last = (shard_of(tmp_path / "model", rank) for rank in (0, 1))
    return (
        FarStages(first, ROOM, device, forth, back),
        FarStages(last, ROOM, device, back, forth),
    )


def test_activations_of_several_steps_in_flight_reach_the_stage_behind(
    stages: tuple[FarStages, FarStages],
) -> None:
    first, last = stages
    sizes = {number: 1 + number % ROOM.max_rows for number in range(1, 10)}
    for number, num_rows in sizes.items():
        first.leave(number, buffers_of(num_rows, float(number)))
    for number, num_rows in sizes.items():
        found = buffers_of(num_rows)
        last.enter(number, None, found)
        sent = buffers_of(num_rows, float(number))
        assert torch.equal(found.residual_ME, sent.residual_ME)
        assert torch.equal(found.normed_ME, sent.normed_ME)
        last.watch(number).check()


def test_ids_lie_where_a_later_step_looks_for_them(stages: tuple[FarStages, FarStages]) -> None:
    first, last = stages
    for number in range(1, 12):
        last.return_ids(number, torch.arange(3, dtype=torch.int32) + 10 * number)
        first.expect_ids(number, 3)
        first.enter(number + 1, number, buffers_of(1))
        start = number % ROOM.num_id_rows * ROOM.max_samples
        assert first.ids[start : start + 3].tolist() == [10 * number + i for i in range(3)]
