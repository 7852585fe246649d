"""How many processes a replica consists of, and whether they may be on several nodes."""

from dataclasses import dataclass
from typing import Annotated

import typer


@dataclass(frozen=True, kw_only=True, slots=True)
class RankOptions:
    """Tensor ranks, and stages; those of decode replicas may differ."""

    tensor_parallel_size: Annotated[
        int,
        typer.Option("--tensor-parallel-size", "-tp", help="Ranks that share each layer."),
    ] = 1
    pipeline_parallel_size: Annotated[
        int,
        typer.Option("--pipeline-parallel-size", "-pp", help="Stages that share the layers."),
    ] = 1
    decode_tensor_parallel_size: Annotated[
        int | None, typer.Option(help="Of decode replicas, if it differs.")
    ] = None
    decode_pipeline_parallel_size: Annotated[
        int | None, typer.Option(help="Of decode replicas, if it differs.")
    ] = None
    spread_stages: Annotated[
        bool,
        typer.Option(
            "--spread-stages",
            help="Stages on nodes of their own: Ray's, or where pdserve stage runs.",
        ),
    ] = False
    stage_token: Annotated[
        str | None,
        typer.Option(
            show_envvar=True, help="The same here and for pdserve stage. The variable hides it."
        ),
    ] = None
