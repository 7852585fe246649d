"""Both ends of a stage elsewhere, in one process, with ranks that compute nothing."""

import asyncio
import os
import pickle
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from pdserve.config.engine import EngineConfig
from pdserve.config.stage import StageConfig
from pdserve.config.wire import worker_config_to_json
from pdserve.config.worker import WorkerConfig
from pdserve.errors import ConfigError, PdserveError, WorkerLost
from pdserve.face.rank_group import RankGroup, start_ranks
from pdserve.face.rank_process import RankHandlers
from pdserve.face.stage_claims import StageClaimer
from pdserve.process import is_running
from pdserve.registry.memory import MemoryRegistry
from pdserve.request import Incarnation, Role, WorkerId
from pdserve.rpc.channel import AsyncChannel
from pdserve.rpc.stage_handshake import Claim, knock
from pdserve.rpc.v1 import stage_pb2
from pdserve.stage.holder import StageHolder
from pdserve.timeline import MonotonicClock
from tests.support.cluster import wait_until_async
from tests.support.models import tiny_llama_folder  # noqa: F401
from tests.support.tiny_models import make_tiny

STAND_IN = "tests.support.stand_in_rank"
TOKEN = "a-token-of-this-test-alone"
SILENCE_S = 2.0
LIMIT_S = 20.0


def quiet_handlers(on_leaving: Callable[[], None] = lambda: None) -> RankHandlers:
    return RankHandlers(
        on_updates=lambda _: None,
        on_heartbeat=lambda _: None,
        on_peer_call=lambda *_: None,
        on_phase=lambda _: None,
        on_leaving=on_leaving,
    )


@dataclass
class World:
    """A stage's holder, and what a face of its worker needs."""

    holder: StageHolder
    holding: asyncio.Task[None]
    registry: MemoryRegistry
    worker: WorkerConfig
    lines: list[str] = field(default_factory=list)
    leaving: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a face hears that its stage was told to end."""

    def claimer(self, number: int, **changes: object) -> StageClaimer:
        claimer = StageClaimer(
            config=self.worker,
            incarnation=Incarnation(number),
            registry=self.registry,
            say=self.lines.append,
        )
        return replace(claimer, **changes)  # type: ignore[arg-type]

    @asynccontextmanager
    async def face(self, number: int = 1) -> AsyncIterator[tuple[RankGroup, asyncio.Task[None]]]:
        """A face's ranks, all of them ready."""
        handlers = quiet_handlers(self.leaving.set)
        async with asyncio.timeout(LIMIT_S):
            stages = await self.claimer(number).claim_all()
            group = await start_ranks(
                STAND_IN, self.worker, Incarnation(number), handlers, stages
            )  # fmt: skip
        running = asyncio.create_task(group.run())
        try:
            async with asyncio.timeout(LIMIT_S):
                await group.wait_ready()
            yield group, running
        finally:
            await group.stop(timeout_s=5)
            await running


@asynccontextmanager
async def world(
    folder: Path, *, tensor: int = 1, model: Path | None = None
) -> AsyncIterator[World]:
    registry = MemoryRegistry(MonotonicClock())
    config = StageConfig(
        worker_id="decode-0",
        stage=1,
        redis_url="",
        stage_token=TOKEN,
        heartbeat_s=0.1,
        model=None if model is None else str(model),
    )
    engine = EngineConfig(model=str(folder), tensor_parallel=tensor, pipeline_parallel=2)
    worker = WorkerConfig(
        role=Role.DECODE,
        worker_id="decode-0",
        engine=engine,
        redis_url="redis://:password@127.0.0.1:1/0",
        spread_stages=True,
        stage_token=TOKEN,
        stage_silence_s=SILENCE_S,
    )
    lines: list[str] = []
    holder = StageHolder(config, registry, {Role.DECODE: STAND_IN}, lines.append)
    holding = asyncio.create_task(holder.run())

    async def is_registered() -> bool:
        return bool(await registry.list_stages(WorkerId("decode-0")))

    try:
        await wait_until_async(is_registered, LIMIT_S, "registered")
        yield World(holder, holding, registry, worker)
    finally:
        if not holding.done():
            os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(LIMIT_S):
            await holding
        assert not await is_registered()


async def wait_for(condition: Callable[[], bool]) -> None:
    async def holds() -> bool:
        return condition()

    await wait_until_async(holds, LIMIT_S, "the condition")


def pids_of(group: RankGroup) -> list[int]:
    return [rank.pid for rank in group.describe("here", 1)]


def are_gone(pids: list[int]) -> bool:
    return not any(is_running(pid) for pid in pids)


async def test_a_claimed_stage_starts_its_ranks_and_they_end_with_the_face(
    tiny_llama_folder: Path,  # noqa: F811
) -> None:
    async with world(tiny_llama_folder, tensor=2) as found:
        async with found.face() as (group, _):
            ranks = group.describe("here", 2)
            assert [(r.rank, r.stage, r.node) for r in ranks] == [
                (0, 0, "here"), (1, 0, "here"), (2, 1, "127.0.0.1"), (3, 1, "127.0.0.1"),
            ]  # fmt: skip
            assert group.pids == (ranks[0].pid, ranks[1].pid)
            pids = pids_of(group)
            assert not any(not is_running(pid) for pid in pids)
        await wait_for(lambda: are_gone(pids))


async def test_no_secret_is_on_the_command_line_of_a_rank(
    tiny_llama_folder: Path,  # noqa: F811
) -> None:
    async with world(tiny_llama_folder) as found, found.face() as (group, _):
        for pid in pids_of(group):
            command = command_of(pid)
            assert "decode-0" in command
            assert TOKEN not in command
            assert "password" not in command


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8")


@pytest.mark.parametrize("victim", [0, 1])
async def test_A15_the_death_of_a_rank_on_either_node_ends_all_and_the_stage_waits_again(
    tiny_llama_folder: Path,  # noqa: F811
    victim: int,
) -> None:
    async with world(tiny_llama_folder) as found:
        async with found.face(1) as (group, running):
            pids = pids_of(group)
            os.kill(pids[victim], signal.SIGKILL)
            async with asyncio.timeout(LIMIT_S):
                await running
        await wait_for(lambda: are_gone(pids))
        async with found.face(2) as (group, _):
            assert set(pids_of(group)).isdisjoint(pids)


async def test_C2_a_newer_incarnation_of_the_face_takes_the_stage_from_an_older_one(
    tiny_llama_folder: Path,  # noqa: F811
) -> None:
    async with (
        world(tiny_llama_folder) as found,
        found.face(1) as (old, old_running),
        found.face(2) as (new, _),
    ):
        async with asyncio.timeout(LIMIT_S):
            await old_running
        await wait_for(lambda: are_gone(pids_of(old)[1:]))
        assert not are_gone(pids_of(new))


async def test_C15_a_stage_that_is_told_to_end_waits_for_its_face_to_drain(
    tiny_llama_folder: Path,  # noqa: F811
) -> None:
    async with world(tiny_llama_folder) as found:
        async with found.face() as (group, running):
            os.kill(os.getpid(), signal.SIGTERM)
            async with asyncio.timeout(LIMIT_S):
                await found.leaving.wait()
            assert await found.registry.list_stages(WorkerId("decode-0")) == ()
            assert not running.done()
            assert not are_gone(pids_of(group)[1:])
        async with asyncio.timeout(LIMIT_S):
            await found.holding
        assert are_gone(pids_of(group))


async def test_a_second_signal_ends_a_stage_at_once(
    tiny_llama_folder: Path,  # noqa: F811
) -> None:
    async with world(tiny_llama_folder) as found, found.face() as (group, running):
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(LIMIT_S):
            await found.leaving.wait()
            os.kill(os.getpid(), signal.SIGTERM)
            await running
            await found.holding
        assert are_gone(pids_of(group)[1:])


async def test_a_silent_face_is_given_up_in_time(tiny_llama_folder: Path) -> None:  # noqa: F811
    async with world(tiny_llama_folder) as found:
        (stage,) = await found.claimer(5).claim_all()
        told = replace(found.worker, redis_url="", stage_token=None)
        start = stage_pb2.StartStage(config=worker_config_to_json(told), silence_s=0.5)
        await stage.orders.send(stage_pb2.ToStage(start=start).SerializeToString())
        answer = stage_pb2.FromStage.FromString(await stage.orders.receive())
        (pid,) = answer.started.pids
        assert is_running(pid)
        await wait_for(lambda: are_gone([pid]))
        stage.close()


async def test_a_stage_that_stopped_answering_is_given_up_in_time(
    tiny_llama_folder: Path,  # noqa: F811
) -> None:
    async with world(tiny_llama_folder) as found:
        stages = await found.claimer(5).claim_all()
        frozen = asyncio.Event()
        group = await start_ranks(
            STAND_IN, found.worker, Incarnation(5), quiet_handlers(), stages
        )  # fmt: skip
        running = asyncio.create_task(group.run())
        await group.wait_ready()
        life = found.holder._life
        assert life is not None

        async def say_nothing(message: stage_pb2.FromStage) -> None:
            await frozen.wait()

        life._tell = say_nothing  # type: ignore[method-assign]
        async with asyncio.timeout(LIMIT_S):
            await running
        frozen.set()
        await group.stop(timeout_s=5)
        await wait_for(lambda: are_gone(pids_of(group)))


async def test_E1_strangers_are_refused_and_counted_and_the_replica_lives_on(
    tiny_llama_folder: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    bomb = pickle.dumps(Bomb(tmp_path / "canary"))
    async with world(tiny_llama_folder) as found, found.face() as (group, running):
        host, _, port = found.holder.door.address.rpartition(":")
        strangers = [
            lambda: throw(host, int(port), bomb),
            lambda: throw(host, int(port), len(bomb).to_bytes(4, "big") + bomb),
            lambda: throw(host, int(port), b"\xff\xff\xff\xff"),
            lambda: knock_at(host, int(port), b"some other token"),
        ]
        for number, stranger in enumerate(strangers, start=1):
            await stranger()
            await wait_for(lambda number=number: found.holder.door.num_refused == number)  # type: ignore[misc]
        await wait_for(lambda: group.num_refused == len(strangers))
        assert not running.done()
        assert not (tmp_path / "canary").exists()


async def test_a_connection_of_another_incarnation_than_the_face_is_turned_away(
    tiny_llama_folder: Path,  # noqa: F811
) -> None:
    async with world(tiny_llama_folder) as found, found.face(1) as (_, running):
        host, _, port = found.holder.door.address.rpartition(":")
        with pytest.raises(WorkerLost):
            await knock_at(host, int(port), TOKEN.encode(), rank=1, incarnation=9)
        assert not running.done()


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._command = f"touch {path}"

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (self._command,)


async def throw(host: str, port: int, payload: bytes) -> None:
    _, writer = await asyncio.open_connection(host, port)
    writer.write(payload)
    writer.write_eof()
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


async def knock_at(
    host: str, port: int, token: bytes, *, rank: int | None = None, incarnation: int = 1
) -> None:
    connection = socket.create_connection((host, port), timeout=5)
    channel = AsyncChannel(connection)
    claim = Claim(
        worker_id="decode-0", incarnation=Incarnation(incarnation), stage=1, rank=rank
    )  # fmt: skip
    try:
        async with asyncio.timeout(LIMIT_S):
            await knock(channel, token, claim)
    except WorkerLost:
        if token == TOKEN.encode():
            raise
    finally:
        channel.close()


async def test_a_stage_with_another_model_is_refused_by_name(
    tiny_llama_folder: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    other = make_tiny(tmp_path, "llama", num_hidden_layers=3)
    async with world(tiny_llama_folder, model=other) as found:
        with pytest.raises(ConfigError, match=r"stage 1 on 127\.0\.0\.1 has another model"):
            async with found.face():
                raise AssertionError("it started")


async def test_a_stage_whose_model_is_missing_says_so_through_its_face(
    tiny_llama_folder: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    async with world(tiny_llama_folder, model=tmp_path / "absent") as found:
        with pytest.raises(ConfigError, match=r"stage 1 on 127\.0\.0\.1: .*absent"):
            async with found.face():
                raise AssertionError("it started")


async def test_a_face_without_its_stages_waits_and_says_so(
    tiny_llama_folder: Path,  # noqa: F811
) -> None:
    async with world(tiny_llama_folder) as found:
        found.registry.is_available = False
        claiming = asyncio.create_task(found.claimer(1, patience_s=0.1).claim_all())
        await wait_for(lambda: len(found.lines) >= 2)
        assert found.lines[0].startswith("waits for stage 1 on another node (none is registered")
        found.registry.is_available = True
        async with asyncio.timeout(LIMIT_S):
            (stage,) = await claiming
        stage.close()


async def test_a_face_with_another_token_waits_and_names_the_stage(
    tiny_llama_folder: Path,  # noqa: F811
) -> None:
    async with world(tiny_llama_folder) as found:
        config = replace(found.worker, stage_token="some other token of a test")
        claimer = found.claimer(1, patience_s=0.1, config=config)
        claiming = asyncio.create_task(claimer.claim_all())
        await wait_for(lambda: len(found.lines) >= 2)
        assert "another stage_token" in found.lines[-1]
        assert found.holder.door.address in found.lines[-1]
        claiming.cancel()
        await asyncio.gather(claiming, return_exceptions=True)
        assert found.holder.door.num_refused >= 2


async def test_spread_stages_without_a_token_are_refused(
    tiny_llama_folder: Path,  # noqa: F811
) -> None:
    async with world(tiny_llama_folder) as found:
        config = replace(found.worker, stage_token=None)
        with pytest.raises(PdserveError, match="stage_token must have"):
            await found.claimer(1, config=config).claim_all()
