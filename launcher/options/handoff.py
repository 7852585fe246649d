"""How KV gets from prefill to decode, and when it need not."""

from dataclasses import dataclass, replace
from typing import Annotated

import typer

from pdserve.config.load import from_pairs, renaming
from pdserve.config.worker import TRANSPORTS, FaultConfig, HandoffConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class HandoffOptions:
    """Transports, prompts that decode computes itself, and faults on the way."""

    transports: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="What KV may travel over, the preferred first.",
            show_default=",".join(TRANSPORTS),
        ),
    ] = None
    max_local_prefill_tokens: Annotated[
        int | None,
        typer.Option(help="Prompt tokens a decode replica may compute for a request."),
    ] = None
    local_prefill_tokens: Annotated[
        int,
        typer.Option(help="Let a decode replica prefill what is at most this much uncached there."),
    ] = 0
    handoff: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", hidden=True, help="Of HandoffConfig.")
    ] = None
    prefill_fault: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", hidden=True, help="Of FaultConfig.")
    ] = None
    decode_fault: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", hidden=True, help="Of FaultConfig.")
    ] = None

    def config(self) -> HandoffConfig:
        """Returns the hand-off of both pools.

        Raises:
            ConfigError: a value is out of range, or a transport is unknown.
        """
        config = from_pairs(HandoffConfig, self.handoff or (), "--handoff")
        if self.transports is None:
            return config
        with renaming({"transports": "--transports"}):
            return replace(config, transports=tuple(self.transports.replace(",", " ").split()))

    def prefill_faults(self) -> FaultConfig:
        """Returns what is to go wrong on prefill replicas."""
        return from_pairs(FaultConfig, self.prefill_fault or (), "--prefill-fault")

    def decode_faults(self) -> FaultConfig:
        """Returns what is to go wrong on decode replicas."""
        return from_pairs(FaultConfig, self.decode_fault or (), "--decode-fault")
