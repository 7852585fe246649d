"""How long a cluster may take to start and to end, and what it writes meanwhile."""

import sys
from dataclasses import dataclass
from typing import Annotated

import typer

from pdserve.config.log_level import LogLevel


@dataclass(frozen=True, kw_only=True, slots=True)
class LifeOptions:
    """Limits of the start and the end, logs and spans."""

    ready_timeout_s: Annotated[float, typer.Option(help="Limit of the start.")] = 120.0
    drain_timeout_s: Annotated[float, typer.Option(help="For running requests at the end.")] = 60.0
    log_level: Annotated[
        LogLevel | None,
        typer.Option(help="Of the children; by default warning on a terminal and info otherwise."),
    ] = None
    span_folder: Annotated[
        str | None,
        typer.Option(hidden=True, help="Where ranks write down the stages of each request."),
    ] = None


def default_log_level() -> LogLevel:
    """Returns how much children log: on a terminal no more than what somebody must see."""
    return "warning" if sys.stderr.isatty() else "info"
