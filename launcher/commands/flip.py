"""`pdserve flip`: a replica of a running `pdserve serve` goes on in the other pool."""

import time
from typing import Annotated

import typer

from launcher.control import ControlFile, call_control, control_folder, find_control
from pdserve.config.load import read_runtime_folder
from pdserve.errors import DeadlineExceeded
from pdserve.rpc.v1 import control_pb2

_TIMEOUT_S = 10.0
_POLL_S = 0.1


def flip(
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="Such as prefill-1.")],
    role: Annotated[str, typer.Argument(metavar="ROLE", help="prefill or decode.")],
    cluster: Annotated[
        str | None, typer.Option(help="As of serve; not needed while one cluster runs here.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Return when it serves there.")] = False,
    timeout_s: Annotated[
        float, typer.Option(min=0.0, help="With --wait: how long; then the exit status is 1.")
    ] = 120.0,
) -> int:
    """Let a replica of a running `pdserve serve` go on in the other pool, its weights loaded.

    It drains first: no request is cut. Fixed sizes of the pools move along.
    """
    file = find_control(control_folder(read_runtime_folder()), cluster)
    request = control_pb2.FlipWorkerRequest(worker_id=worker, role=role)
    ordered_s = time.monotonic()
    call_control(file, lambda stub, key: stub.FlipWorker(request, timeout=_TIMEOUT_S, metadata=key))
    typer.echo(f"{worker} drains to become a {role} replica")
    if wait:
        while not _serves(file, worker, role):
            if time.monotonic() - ordered_s > timeout_s:
                raise DeadlineExceeded(
                    f"{worker} does not serve as a {role} replica after {timeout_s:g} s"
                )
            time.sleep(_POLL_S)
        typer.echo(
            f"{worker} serves as a {role} replica after {time.monotonic() - ordered_s:.1f} s"
        )
    return 0


def _serves(file: ControlFile, worker: str, role: str) -> bool:
    request = control_pb2.GetWorkerRequest(worker_id=worker)
    found: control_pb2.GetWorkerResponse = call_control(
        file, lambda stub, key: stub.GetWorker(request, timeout=_TIMEOUT_S, metadata=key)
    )
    return found.role == role and found.is_serving
