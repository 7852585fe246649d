"""The process that talks to Ray; `ray_keeper` starts it and outlives it."""

import argparse
import logging
import os
import socket
import sys
from pathlib import Path

import ray

from launcher.ray_driver import RayDriver
from pdserve.process import is_running, list_descendants
from pdserve.rpc.channel import BlockingChannel

_CONNECT_TIMEOUT_S = 5.0
_OBJECT_STORE_BYTES = 80 << 20
"""About the least that Ray takes; nothing of ours goes there."""


def main() -> int:
    """Connects to Ray and drives it; returns the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--channel-fd", type=int, required=True)
    parser.add_argument("--num-cpus", type=int, required=True)
    parser.add_argument("--temp-dir", required=True)
    parser.add_argument("--address")
    parser.add_argument("--dashboard", action="store_true")
    options = parser.parse_args()
    channel = BlockingChannel(socket.socket(fileno=options.channel_fd))
    where = options.address
    try:
        if options.address is not None:
            _check_answers(options.address)
            context = ray.init(
                address=options.address, log_to_driver=False, logging_level=logging.ERROR
            )
        else:
            context = ray.init(
                num_cpus=options.num_cpus,
                include_dashboard=options.dashboard,
                dashboard_host="127.0.0.1",
                object_store_memory=_OBJECT_STORE_BYTES,
                _node_ip_address="127.0.0.1",
                _temp_dir=options.temp_dir,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        line = (str(error).splitlines() or [type(error).__name__])[0]
        what = "Ray does not start" if where is None else f"Ray at {where} does not answer"
        sys.stderr.write(f"{what}: {line}\n")
        return 2
    raylets = _raylets()
    sys.stderr.write(
        f"connected to Ray at {ray.get_runtime_context().gcs_address} ({ray.__version__})\n"
    )
    if context.dashboard_url:
        sys.stderr.write(f"dashboard http://{context.dashboard_url}\n")
    driver = RayDriver(channel, lambda: all(is_running(pid) for pid in raylets))
    if not driver.run():
        sys.stderr.write("the raylet ended\n")
        return 1
    if options.address is not None:
        ray.shutdown()
    return 0


def _check_answers(address: str) -> None:
    """Fails early: Ray itself tries for over a minute.

    Raises:
        OSError: nobody listens there.
    """
    host, _, port = address.rpartition(":")
    if host and "/" not in address and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S).close()


def _raylets() -> list[int]:
    """Returns our own raylet; none if the cluster is somebody else's."""
    names = ((pid, Path(f"/proc/{pid}/comm")) for pid in list_descendants(os.getpid()))
    return [pid for pid, path in names if path.exists() and path.read_text().strip() == "raylet"]


if __name__ == "__main__":
    sys.exit(main())
