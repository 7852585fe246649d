"""Holds one pipeline stage of a worker on a node of its own, over all incarnations of its face.

waiting (registered) -> claimed by a face -> its ranks run -> they ended -> waiting
"""

import asyncio
import logging
import secrets
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress

from pdserve.config.stage import StageConfig
from pdserve.registry.base import Registry, RegistryUnavailable, StageRecord
from pdserve.request import Incarnation, Role, WorkerId
from pdserve.rpc.channel import AsyncChannel, ChannelClosed
from pdserve.rpc.stage_handshake import Claim, accept, check_token
from pdserve.stage.door import Door
from pdserve.stage.life import StageLife

logger = logging.getLogger(__name__)


class StageHolder:
    """Lives on one event loop, on the main thread."""

    def __init__(
        self,
        config: StageConfig,
        registry: Registry,
        modules: Mapping[Role, str],
        say: Callable[[str], None],
    ) -> None:
        """Listens, but lets nobody in yet.

        Args:
            config: of the stage.
            registry: where the face looks for it.
            modules: what a rank of each role runs, as `python -m MODULE`.
            say: prints a line for people.

        Raises:
            ConfigError: no token that is worth its name, or a port that is taken.
        """
        self._config = config
        self._registry = registry
        self._modules = modules
        self._say = say
        self._token = check_token(config.stage_token)
        self.door = Door(config.host, config.port)
        self._record = StageRecord(
            worker_id=WorkerId(config.worker_id),
            stage=config.stage,
            incarnation=Incarnation(secrets.randbits(64)),
            address=self.door.address,
        )
        self._life: StageLife | None = None
        self._living: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()
        """Of claims: one life ends before the next begins."""

    async def run(self) -> None:
        """Serves until SIGTERM or SIGINT: then the replica drains. A second one ends it at once."""
        config = self._config
        stopped, cut = asyncio.Event(), asyncio.Event()

        def on_signal() -> None:
            (cut if stopped.is_set() else stopped).set()

        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, on_signal)
        tasks: list[asyncio.Task[None]] = [
            asyncio.create_task(self._keep_registered()),
            asyncio.create_task(
                self.door.open(self._token, config.worker_id, config.stage, self._grant)
            ),
        ]
        stopping = asyncio.create_task(stopped.wait())
        self._say(f"stage {config.stage} of {config.worker_id} waits on {self.door.address}")
        try:
            await asyncio.wait({*tasks, stopping}, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            stopping.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.door.close()
            # Before anything else: the face's next incarnation must not come here.
            await self._leave()
            if stopped.is_set():
                await self._drain(cut)
            await self._end_life()

    async def _drain(self, cut: asyncio.Event) -> None:
        """Waits until the face has let go; it bounds that itself."""
        life, living = self._life, self._living
        if life is None or living is None or living.done():
            return
        self._say(f"stage {self._config.stage} of {self._config.worker_id} drains")
        with suppress(ChannelClosed):
            await life.leave()
        cutting = asyncio.create_task(cut.wait())
        await asyncio.wait((living, cutting), return_when=asyncio.FIRST_COMPLETED)
        cutting.cancel()

    async def _keep_registered(self) -> None:
        is_reachable = True
        while True:
            try:
                await self._registry.register_stage(self._record, self._config.registry_lease_s)
                is_reachable = True
            except RegistryUnavailable as error:
                if is_reachable:
                    logger.warning("registry is away", extra={"reason": str(error)})
                is_reachable = False
            await asyncio.sleep(self._config.heartbeat_s)

    async def _leave(self) -> None:
        try:
            await self._registry.deregister_stage(self._record)
        except RegistryUnavailable:
            logger.info("left without a word: the registry is away")

    async def _grant(self, claim: Claim, channel: AsyncChannel) -> None:
        """Takes a face in, or one more connection of the face that is in already.

        Raises:
            ChannelClosed: it has left, or its claim is out of date.
        """
        if claim.rank is not None:
            if self._life is None or self._life.incarnation != claim.incarnation:
                raise ChannelClosed("no such incarnation")
            self._life.add_steps(claim.rank, channel)
            await accept(channel, self._config.host)
            return
        async with self._turn:
            # The latest face is the right one: an older one is dead or cut off.
            await self._end_life()
            life = self._life = StageLife(
                channel,
                claim.incarnation,
                self._config,
                self._modules,
                lambda: self.door.num_refused,
            )
            await accept(channel, self._config.host)
            self._living = asyncio.create_task(self._live(life))

    async def _live(self, life: StageLife) -> None:
        await life.run()
        self._say(f"stage {self._config.stage} of {self._config.worker_id} waits again")

    async def _end_life(self) -> None:
        living, self._living, self._life = self._living, None, None
        if living is not None:
            living.cancel()
            await asyncio.gather(living, return_exceptions=True)
