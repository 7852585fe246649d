"""`pdserve flip`: a replica of a running `pdserve serve` goes on in the other pool."""

from typing import Annotated

import typer

from launcher.control import call_control, control_folder, find_control
from pdserve.config.load import read_runtime_folder
from pdserve.rpc.v1 import control_pb2

_TIMEOUT_S = 10.0


def flip(
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="Such as prefill-1.")],
    role: Annotated[str, typer.Argument(metavar="ROLE", help="prefill or decode.")],
    cluster: Annotated[
        str | None, typer.Option(help="As of serve; not needed while one cluster runs here.")
    ] = None,
) -> int:
    """Let a replica of a running `pdserve serve` go on in the other pool, its weights loaded.

    It drains first: no request is cut. Fixed sizes of the pools move along.
    """
    file = find_control(control_folder(read_runtime_folder()), cluster)
    request = control_pb2.FlipWorkerRequest(worker_id=worker, role=role)
    call_control(file, lambda stub, key: stub.FlipWorker(request, timeout=_TIMEOUT_S, metadata=key))
    typer.echo(f"{worker} drains to become a {role} replica")
    return 0
