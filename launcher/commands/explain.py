"""`pdserve explain`: why a request went where it went, and where its time went."""

import json
from typing import Annotated

import grpc
import typer
from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.table import Table

from launcher.client import bearer, client_error, open_sync_channel
from launcher.commands.generate import DEFAULT_ADDRESS, Address, ApiKey
from launcher.tables import make_table, open_console
from pdserve.rpc.v1 import inference_pb2, inference_pb2_grpc

_TIMEOUT_S = 10.0
_TERMS = ("queue", "prefill", "handoff", "wait", "step", "stall", "first token", "cost", "missed")


def explain(
    request_id: Annotated[
        str,
        typer.Argument(help="Of a request that runs, or ended lately; or its HTTP X-Request-Id."),
    ],
    address: Address = DEFAULT_ADDRESS,
    api_key: ApiKey = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Show why a request went where it went, and where its time went."""
    with open_sync_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        try:
            asked = inference_pb2.ExplainRequest(request_id=request_id)
            found = stub.Explain(asked, _TIMEOUT_S, bearer(api_key))
        except grpc.RpcError as error:
            raise client_error(error, address) from error
    if as_json:
        typer.echo(json.dumps(to_json(found)))
        return 0
    show(found, open_console())
    return 0


def to_json(found: inference_pb2.ExplainResponse) -> dict[str, object]:
    """Shapes an explanation for JSON; zeros are written."""
    shown: dict[str, object] = MessageToDict(
        found, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return shown


def show(found: inference_pb2.ExplainResponse, console: Console) -> None:
    """Prints the critical path, then one table of candidates for each placement."""
    by_http = f", X-Request-Id {found.http_request_id}" if found.http_request_id else ""
    title = f"{found.request_id}: {found.state}, {found.prompt_tokens} prompt tokens{by_http}"
    console.print(title, soft_wrap=True, markup=False, highlight=False)
    if found.namesakes:
        others = ", ".join(found.namesakes)
        console.print(f"others of this X-Request-Id: {others}", soft_wrap=True, markup=False)
    parts = " + ".join(f"{part.name} {_ms(part.seconds)}" for part in found.critical_path)
    if found.HasField("ttft_s"):
        expected = f", expected {_ms(found.expected_ttft_s)}"
        shown = expected if found.HasField("expected_ttft_s") else ""
        console.print(f"first token after {_ms(found.ttft_s)} = {parts}{shown}", soft_wrap=True)
    for placed in found.placements:
        console.print(_table_of(placed))


def _table_of(placed: inference_pb2.Placement) -> Table:
    rows = []
    for one in placed.candidates:
        values = (
            one.queue,
            one.prefill,
            one.handoff,
            one.wait,
            one.step,
            one.stall,
            one.first_token,
            one.cost,
            one.missed,
        )
        name = one.prefill_worker or "(local)"
        rows.append((name, one.decode_worker, *(f"{value:.4g}" for value in values)))
    title = (
        f"attempt {placed.attempt} at {_ms(placed.at_s)}: {placed.path}, "
        f"{placed.cached_tokens} tokens cached, costs in {placed.unit}"
    )
    return make_table(("prefill", "decode", *_TERMS), rows, title=title, num_names=2)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"
