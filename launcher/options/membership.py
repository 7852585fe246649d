"""Where the processes of a cluster find each other."""

from dataclasses import dataclass
from typing import Annotated

import typer


@dataclass(frozen=True, kw_only=True, slots=True)
class MembershipOptions:
    """A Redis, and the cluster's name in it."""

    redis: Annotated[
        str | None, typer.Option(help="redis://...; without it a private one starts.")
    ] = None
    cluster: Annotated[str | None, typer.Option(help="Name in Redis; made up by default.")] = None
