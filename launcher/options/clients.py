"""Who may ask, by which names, and what they may expect."""

from dataclasses import dataclass
from typing import Annotated

import typer


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientOptions:
    """Names and keys of clients, and their objectives."""

    served_model_name: Annotated[str | None, typer.Option(help="The name clients use.")] = None
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[TENANT=]KEY",
            show_envvar=True,
            help="Ask all clients for a key; may be repeated. A file hides it from ps.",
        ),
    ] = None
    api_keys_file: Annotated[str | None, typer.Option(help="File with lines of TENANT KEY.")] = None
    strict_fields: Annotated[
        bool,
        typer.Option(
            "--strict-fields",
            help="Refuse HTTP requests with unknown fields; else each name is warned of once.",
        ),
    ] = False
    max_queued: Annotated[
        int, typer.Option(min=1, help="Requests that wait for a place; one more is refused.")
    ] = 1024
    max_in_flight: Annotated[
        int, typer.Option(min=1, help="Requests that have not ended; one more is refused.")
    ] = 4096
    profile: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE", help="What steps take on this device; may be repeated. Else learned."
        ),
    ] = None
    slo_class: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=ttft_s:S,tpot_s:S,priority:N",
            help="What requests of a class want; may be repeated.",
        ),
    ] = None
