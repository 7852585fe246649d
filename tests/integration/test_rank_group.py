"""What a face tells the processes of its ranks, tried with ranks that compute nothing."""

import asyncio
from pathlib import Path

import pytest

from pdserve.config.engine import DeviceKind, EngineConfig
from pdserve.config.worker import WorkerConfig
from pdserve.errors import ConfigError
from pdserve.face.rank_group import start_ranks
from pdserve.face.rank_process import RankHandlers
from pdserve.request import Incarnation, Role
from pdserve.rpc.v1 import rank_pb2
from tests.support.models import tiny_llama_folder  # noqa: F401

STAND_IN = "tests.support.stand_in_rank"


def worker(folder: Path, device: DeviceKind = "cuda", tensor: int = 2) -> WorkerConfig:
    engine = EngineConfig(model=str(folder), device=device, tensor_parallel=tensor)
    return WorkerConfig(
        role=Role.DECODE, worker_id="decode-0", engine=engine, redis_url="redis://127.0.0.1:1/0"
    )  # fmt: skip


def phases_of(config: WorkerConfig) -> dict[str, str]:
    """Starts the ranks, stops them, and returns what they said of their variables."""
    phases: dict[str, str] = {}

    def note(phase: rank_pb2.RankPhase) -> None:
        phases[phase.name] = phase.detail

    handlers = RankHandlers(
        on_updates=lambda _: None,
        on_heartbeat=lambda _: None,
        on_peer_call=lambda *_: None,
        on_phase=note,
        on_leaving=lambda: None,
    )

    async def live() -> None:
        group = await start_ranks(STAND_IN, config, Incarnation(7), handlers)
        running = asyncio.create_task(group.run())
        try:
            async with asyncio.timeout(60):
                await group.wait_ready()
        finally:
            await group.stop(timeout_s=5)
            await running

    asyncio.run(live())
    return phases


def test_each_rank_sees_its_own_gpu_and_no_other(
    tiny_llama_folder: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7,9")
    phases = phases_of(worker(tiny_llama_folder))
    assert phases["0 CUDA_VISIBLE_DEVICES"] == "4"
    assert phases["1 CUDA_VISIBLE_DEVICES"] == "7"


def test_a_rank_alone_sees_one_gpu_of_several(
    tiny_llama_folder: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    assert phases_of(worker(tiny_llama_folder, tensor=1))["0 CUDA_VISIBLE_DEVICES"] == "4"


def test_ranks_on_a_processor_are_told_of_no_gpu(
    tiny_llama_folder: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    phases = phases_of(worker(tiny_llama_folder, device="cpu"))
    assert phases["1 CUDA_VISIBLE_DEVICES"] == ""
    assert phases["1 OMP_NUM_THREADS"] == "1"


def test_more_ranks_than_visible_gpus_are_refused_before_any_is_started(
    tiny_llama_folder: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    with pytest.raises(ConfigError, match="2 ranks need a GPU each"):
        phases_of(worker(tiny_llama_folder))
