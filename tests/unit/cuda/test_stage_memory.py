"""What two stages send each other, in one process: flags, places in turn, a stage missed."""

from pathlib import Path

import pytest
import torch

from pdserve.config.engine import EngineConfig
from pdserve.config.model import ModelConfig
from pdserve.cuda.device import Device
from pdserve.cuda.stages import DeviceStages, StageRoom, connect_device_stages, count_hosts
from pdserve.cuda.tensor_ranks import FileMemory, MemoryKind
from pdserve.cuda.workspace import RowBuffers
from pdserve.errors import WorkerLost
from pdserve.layers.parallel import Shard
from pdserve.models.folder import geometry_of, read_model_config
from pdserve.rank.loading import make_device_shard
from tests.support.tiny_models import make_tiny_llama

ROOM = StageRoom(num_stages=2, max_rows=6, max_samples=4, hidden_size=8, dtype=torch.float32)


class FakeExchange:
    """Tells each rank what the others would, which is the same for all topics but the hosts."""

    def __init__(self, rank: int, hosts: tuple[bytes, bytes]) -> None:
        self.rank = rank
        self._hosts = hosts

    def exchange(self, topic: str, data: bytes) -> tuple[bytes, ...]:
        return self._hosts if topic == "hosts" else (b"0", b"1")


def shard_of(folder: Path, rank: int) -> Shard:
    config: ModelConfig = read_model_config(folder)
    engine = EngineConfig(model=str(folder), pipeline_parallel=2)
    return make_device_shard(config, geometry_of(config, engine), rank)


def connect(folder: Path, rank: int, hosts: tuple[bytes, bytes] = (b"one", b"one")) -> DeviceStages:
    kind = MemoryKind(
        allocate=lambda size: (FileMemory(folder / f"memory-{rank}", size), b""),
        open=lambda handle, size: FileMemory(folder / f"memory-{handle.decode()}", size),
    )
    shard = shard_of(folder / "model", rank)
    exchange = FakeExchange(rank, hosts)
    device = Device(torch.device("cpu"))
    return connect_device_stages(exchange, shard, ROOM, device, kind, max_polls=3)  # type: ignore[arg-type]  # a double


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_tiny_llama(tmp_path / "model")
    return tmp_path


@pytest.fixture
def stages(folder: Path) -> tuple[DeviceStages, DeviceStages]:
    return connect(folder, 0), connect(folder, 1)


def buffers_of(num_rows: int, value: float = 0.0) -> RowBuffers:
    x = torch.full((num_rows, ROOM.hidden_size), value)
    empty = torch.empty(0)
    return RowBuffers(
        residual_ME=x, normed_ME=x + 0.5, q_MHD=empty, heads_MHD=empty, inner_MN=empty
    )


def test_activations_of_several_steps_in_flight_reach_the_stage_behind(
    stages: tuple[DeviceStages, DeviceStages],
) -> None:
    first, last = stages
    for number in range(1, 1 + ROOM.max_steps_in_flight):
        first.leave(number, buffers_of(number, float(number)))
    for number in range(1, 1 + ROOM.max_steps_in_flight):
        found = buffers_of(number)
        last.enter(number, None, found)
        assert torch.equal(found.residual_ME, buffers_of(number, float(number)).residual_ME)
        assert torch.equal(found.normed_ME, buffers_of(number, float(number)).normed_ME)
        last.watch(number).check()


def test_ids_lie_where_a_later_step_looks_for_them(
    stages: tuple[DeviceStages, DeviceStages],
) -> None:
    first, last = stages
    for number in range(1, 12):
        last.return_ids(number, torch.arange(3, dtype=torch.int32) + 10 * number)
        first.enter(number + 1, number, buffers_of(1))
        first.watch(number + 1).check()
        start = number % ROOM.num_id_rows * ROOM.max_samples
        assert first.ids[start : start + 3].tolist() == [10 * number + i for i in range(3)]


def test_a_step_that_awaits_no_token_waits_for_nobody(
    stages: tuple[DeviceStages, DeviceStages],
) -> None:
    first, _ = stages
    first.enter(1, None, buffers_of(1))
    first.watch(1).check()


@pytest.mark.parametrize("rank", [0, 1])
def test_B9_a_stage_that_sends_nothing_is_missed_for_good(
    stages: tuple[DeviceStages, DeviceStages], rank: int
) -> None:
    stage = stages[rank]
    stage.enter(2, 1, buffers_of(1))
    for number in (2, 3):
        with pytest.raises(WorkerLost, match="did not send its part"):
            stage.watch(number).check()


def test_ranks_of_two_hosts_are_told_apart() -> None:
    assert count_hosts(FakeExchange(0, (b"one", b"one"))) == 1  # type: ignore[arg-type]  # a double
    assert count_hosts(FakeExchange(0, (b"one", b"other"))) == 2  # type: ignore[arg-type]  # a double
