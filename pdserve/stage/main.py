"""The main of a process that holds a stage."""

import asyncio
import sys

from pdserve.config.stage import StageConfig
from pdserve.log import configure_logging
from pdserve.registry.redis import RedisRegistry
from pdserve.request import Role
from pdserve.stage.holder import StageHolder

RANK_MODULES = {Role.PREFILL: "prefill_worker.rank", Role.DECODE: "decode_worker.rank"}
"""By name: whoever holds a stage starts these and never imports them."""


def hold_stage(config: StageConfig) -> int:
    """Holds a stage until SIGTERM or SIGINT; returns the exit status.

    Raises:
        ConfigError: no token, or a port that is taken.
    """
    fields = {"worker_id": config.worker_id, "process": f"stage{config.stage}"}
    configure_logging(config.log_level, fields)

    async def hold() -> None:
        async with RedisRegistry(config.redis_url, config.cluster) as registry:
            await StageHolder(config, registry, RANK_MODULES, _say).run()

    asyncio.run(hold())
    return 0


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
