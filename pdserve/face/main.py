"""The main of a worker's face process."""

import faulthandler

import uvloop

from pdserve.config.worker import WorkerConfig
from pdserve.errors import ConfigError, WorkerLost
from pdserve.face.face import EXIT_RANK_LOST, AddServices, Face, report_config_error
from pdserve.log import configure_logging
from pdserve.registry.redis import RedisRegistry

CLOSE_TIMEOUT_S = 20.0
"""Longer than all deadlines of a close together."""


def bound_close(timeout_s: float = CLOSE_TIMEOUT_S) -> None:
    """Ends this process with status 1 if it is still there by then, and says where it stood.

    Not by the event loop: what hangs may be the loop itself, or the interpreter at its end.
    """
    faulthandler.dump_traceback_later(timeout_s, exit=True)


def run_worker(
    config: WorkerConfig,
    rank_module: str,
    service_names: tuple[str, ...],
    add_services: AddServices,
) -> int:
    """Runs one replica until it is drained or lost; returns its exit status.

    Args:
        config: the replica's settings.
        rank_module: what the rank process runs, as `python -m rank_module`.
        service_names: full names of the gRPC services, for health and reflection.
        add_services: adds the pool's own services to the server.
    """
    configure_logging(config.log_level, fields={"worker_id": config.worker_id, "process": "face"})

    async def serve() -> int:
        async with RedisRegistry(config.redis_url, config.cluster) as registry:
            face = Face(config, registry, on_close=bound_close)
            return await face.run(rank_module, service_names, add_services)

    try:
        return uvloop.run(serve())
    except ConfigError as error:
        return report_config_error(error)
    except WorkerLost as error:
        report_config_error(ConfigError(str(error)))
        return EXIT_RANK_LOST
