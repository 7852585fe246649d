"""The main of a worker's face process."""

import faulthandler
import sys
from collections.abc import Mapping
from dataclasses import replace
from itertools import cycle

import uvloop

from pdserve.config.load import tell_by_flags
from pdserve.config.worker import WorkerConfig
from pdserve.errors import ConfigError, WorkerLost
from pdserve.face.face import EXIT_OK, EXIT_RANK_LOST, Face
from pdserve.face.rank_group import RankGroup
from pdserve.face.services import FaceServices
from pdserve.log import configure_logging
from pdserve.registry.redis import RedisRegistry
from pdserve.request import Role

CLOSE_TIMEOUT_S = 20.0
"""Longer than all deadlines of a close together."""
STOP_TIMEOUT_S = 3.0


def bound_close(timeout_s: float = CLOSE_TIMEOUT_S) -> None:
    """Ends this process with status 1 if it is still there by then, and says where it stood.

    Not by the event loop: what hangs may be the loop itself, or the interpreter at its end.
    """
    faulthandler.dump_traceback_later(timeout_s, exit=True)


def run_worker(
    config: WorkerConfig, rank_module: str, services: Mapping[Role, FaceServices]
) -> int:
    """Runs one replica until it is drained or lost; returns its exit status.

    A replica that flips has one face after the other, each with an incarnation of its own.

    Args:
        config: the replica's settings.
        rank_module: what the rank process runs, as `python -m rank_module`.
        services: of each role that it may have.
    """
    if not set(config.roles) <= set(services):
        return report_config_error(
            ConfigError("can_flip must be off: this program has one role", settings=("can_flip",))
        )
    configure_logging(config.log_level, fields={"worker_id": config.worker_id, "process": "face"})

    async def serve() -> int:
        async with RedisRegistry(config.redis_url, config.cluster) as registry:
            ranks: RankGroup | None = None
            for role in cycle(config.roles):
                face = Face(replace(config, role=role), registry, on_close=bound_close)
                ended = await face.run(rank_module, services[role], ranks)
                if isinstance(ended, int):
                    return ended
                ranks = ended
                if face.was_told_to_end:
                    await ranks.stop(STOP_TIMEOUT_S)
                    break
            return EXIT_OK

    try:
        return uvloop.run(serve())
    except ConfigError as error:
        return report_config_error(error)
    except WorkerLost as error:
        report_config_error(ConfigError(str(error)))
        return EXIT_RANK_LOST


def report_config_error(error: ConfigError) -> int:
    """Prints one clear line and returns the exit status of a mistake the user can mend."""
    text = tell_by_flags(error, WorkerConfig)
    print(f"error: {text}", file=sys.stderr, flush=True)  # noqa: T201 - for people
    return 2
