"""Where the router listens."""

from dataclasses import dataclass
from typing import Annotated

import typer


@dataclass(frozen=True, kw_only=True, slots=True)
class ListenerOptions:
    """One address, and a port for each protocol."""

    host: Annotated[str, typer.Option(help="The one address every listener binds.")] = "127.0.0.1"
    port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="The router's gRPC port; 0: a free one."),
    ] = 50051
    http_port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="The router's OpenAI-compatible port; 0: a free one."),
    ] = 8000
    no_http: Annotated[bool, typer.Option("--no-http", help="Listen for gRPC alone.")] = False
    metrics_port: Annotated[
        int, typer.Option(min=0, max=65535, help="The router's /metrics port; 0: a free one.")
    ] = 0
    fronts: Annotated[
        int,
        typer.Option(help="Router processes that share its ports; several share one brain."),
    ] = 1
