"""One replica that can change its pool: `python -m launcher.roles.either_worker --role prefill`."""

import sys

import decode_worker.server
import prefill_worker.server
from launcher.roles.entry import run_worker
from pdserve.config.worker import WorkerConfig
from pdserve.face import main
from pdserve.request import Role

RANK_MODULE = "launcher.roles.either_rank"


def run(config: WorkerConfig) -> int:
    """Runs one replica, in one role or in one after the other; returns the exit status."""
    services = {
        Role.PREFILL: prefill_worker.server.services(),
        Role.DECODE: decode_worker.server.services(),
    }
    return main.run_worker(config, RANK_MODULE, services)


if __name__ == "__main__":
    sys.exit(run_worker(None, run))
