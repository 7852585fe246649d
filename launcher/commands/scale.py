"""`pdserve scale`: other sizes for the pools of a running `pdserve serve`, or what it decided."""

from typing import Annotated

import typer
from rich.table import Table

from launcher.control import call_control, control_folder, find_control
from launcher.options.pools import read_size
from launcher.tables import make_table, open_console
from pdserve.config.load import read_runtime_folder
from pdserve.errors import ConfigError
from pdserve.rpc.v1 import control_pb2

_TIMEOUT_S = 10.0
COLUMNS = (
    "pool",
    "range",
    "serve",
    "start",
    "drain",
    "need",
    "to keep",
    "waiting tokens",
    "oldest",
    "running",
    "KV",
    "TPOT",
)


def scale(
    prefill: Annotated[
        str | None, typer.Option(metavar="N|MIN..MAX", help="Prefill replicas.")
    ] = None,
    decode: Annotated[
        str | None, typer.Option(metavar="N|MIN..MAX", help="Decode replicas.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="As of serve; not needed while one cluster runs here.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would change; change nothing.")
    ] = False,
    status: Annotated[
        bool,
        typer.Option(
            "--status",
            help="Show pools, needs and the last decisions; after new sizes are set, if any.",
        ),
    ] = False,
) -> int:
    """Change the size of the pools of a running `pdserve serve`.

    Replicas that leave drain first: no request is cut.
    """
    if not status and prefill is None and decode is None:
        raise ConfigError("--prefill, --decode or --status is needed")
    request = control_pb2.SetPoolsRequest(
        prefill=_to_wire(prefill, "--prefill"),
        decode=_to_wire(decode, "--decode"),
        is_dry_run=dry_run,
    )
    file = find_control(control_folder(read_runtime_folder()), cluster)
    if prefill is not None or decode is not None:
        answer: control_pb2.SetPoolsResponse = call_control(
            file, lambda stub, key: stub.SetPools(request, timeout=_TIMEOUT_S, metadata=key)
        )
        for line in answer.changes:
            typer.echo(line if dry_run else tell_order(line))
    if status:
        found: control_pb2.GetScalingResponse = call_control(
            file,
            lambda stub, key: stub.GetScaling(
                control_pb2.GetScalingRequest(), timeout=_TIMEOUT_S, metadata=key
            ),
        )
        show_scaling(found)
    return 0


def show_scaling(found: control_pb2.GetScalingResponse) -> None:
    """Prints pools, needs and decisions."""
    console = open_console()
    if not found.pools:
        # Begun a moment ago, or the routers do not answer.
        console.print("no figures yet")
    else:
        console.print(pools_table(found))
    for pool in found.pools:
        if pool.range.most:
            law = pool.law or "no law yet: by what was measured and counted"
            why = pool.why and f"{pool.why}; "
            console.print(f"{pool.role}: {why}{law}", markup=False)
    for decision in found.decisions:
        console.print(f"{decision.age_s:6.0f} s ago  {decision.text}", markup=False)


def tell_order(preview: str) -> str:
    """Tells what was ordered: the size alone, for who leaves is decided with the next round.

    Args:
        preview: what the launcher says of a pool, such as `decode: 1 more would start: 1 -> 2`.
    """
    pool, _, change = preview.partition(": ")
    return f"{pool}: {change.rpartition(': ')[2]}"


def pools_table(found: control_pb2.GetScalingResponse) -> Table:
    """Draws one line per pool."""
    rows = [
        (
            pool.role,
            f"{pool.range.least}..{pool.range.most}",
            str(pool.num_serving),
            str(pool.num_starting),
            str(pool.num_draining),
            str(pool.need),
            str(pool.survivors_need),
            str(pool.backlog_tokens),
            f"{pool.oldest_s:.1f} s",
            str(pool.num_sequences),
            f"{pool.kv_share:.0%}",
            f"{pool.tpot_s * 1000:.0f} ms" if pool.HasField("tpot_s") else "",
        )
        for pool in found.pools
    ]
    return make_table(COLUMNS, rows)


def _to_wire(text: str | None, flag: str) -> control_pb2.PoolRange | None:
    if text is None:
        return None
    bounds = read_size(text, flag)
    return control_pb2.PoolRange(least=bounds.least, most=bounds.most)
