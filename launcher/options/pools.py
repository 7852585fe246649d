"""How many replicas both pools have, and what an autoscaler sizes them for."""

from dataclasses import dataclass, replace
from typing import Annotated

import typer

from autoscaler.settings import PoolRange, ScalingSettings, parse_range
from pdserve.config.load import from_pairs, renaming
from pdserve.errors import ConfigError

SCALING_FLAGS = {
    "most_in_all": "--max-replicas",
    "ttft_s": "--ttft-target-s",
    "tpot_s": "--tpot-target-s",
}
"""Flags of ScalingSettings that bear another name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolOptions:
    """Sizes, and targets of pools that have a range of them."""

    prefill: Annotated[
        str,
        typer.Option(
            metavar="N|MIN..MAX", help="Prefill replicas; 0 lets decode replicas prefill."
        ),
    ] = "1"
    decode: Annotated[str, typer.Option(metavar="N|MIN..MAX", help="Decode replicas.")] = "1"
    max_replicas: Annotated[
        int | None, typer.Option(help="Of both pools together, where they share GPUs.")
    ] = None
    flips: Annotated[
        bool | None,
        typer.Option(
            "--flips/--no-flips",
            help="Replicas may change their pool with their weights loaded. By default where a "
            "pool has a range and both have one shape.",
        ),
    ] = None
    ttft_target_s: Annotated[float, typer.Option(help="What pools of MIN..MAX are sized for.")] = (
        1.0
    )
    tpot_target_s: Annotated[float, typer.Option(help="Likewise, per output token.")] = 0.1
    scaling: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", hidden=True, help="Of ScalingSettings."),
    ] = None

    def settings(self) -> ScalingSettings:
        """Returns what the autoscaler is to reach.

        Raises:
            ConfigError: a size is no range, or out of bounds.
        """
        settings = from_pairs(ScalingSettings, self.scaling or (), "--scaling")
        with renaming(SCALING_FLAGS):
            return replace(
                settings,
                prefill=read_size(self.prefill, "--prefill"),
                decode=read_size(self.decode, "--decode", fewest=1),
                most_in_all=self.max_replicas,
                ttft_s=self.ttft_target_s,
                tpot_s=self.tpot_target_s,
            )

    def can_flip(self, settings: ScalingSettings, obstacle: str | None) -> bool:
        """Says whether replicas are started such that they can change their pool.

        Args:
            settings: as of `settings`.
            obstacle: why they cannot; None where they can.

        Raises:
            ConfigError: the user wants it, and it cannot be.
        """
        if settings.prefill.most == 0:
            obstacle = "there is no prefill pool"
        if self.flips and obstacle is not None:
            raise ConfigError(f"--flips must be off: {obstacle}")
        # It costs memory for the links of both roles: not where nobody may ever ask for it.
        is_wanted = is_sized(settings) if self.flips is None else self.flips
        return is_wanted and obstacle is None


def is_sized(settings: ScalingSettings) -> bool:
    """Says whether there is anything for an autoscaler to decide."""
    return not (settings.prefill.is_fixed and settings.decode.is_fixed)


def first_size(bounds: PoolRange) -> int:
    """Returns how many replicas a pool starts with: one at least, so that the start proves all."""
    return max(bounds.least, min(1, bounds.most))


def read_size(text: str, flag: str, *, fewest: int = 0) -> PoolRange:
    """Reads the size of a pool.

    Raises:
        ConfigError: it is no range, or out of bounds; the text names the flag.
    """
    if text.startswith("-"):
        raise ConfigError(f"{flag} must be at least {fewest}, got {text}")
    try:
        bounds = parse_range(text)
    except ConfigError as error:
        raise ConfigError(f"{flag}: {error}") from error
    if bounds.most < fewest:
        raise ConfigError(f"{flag} must be at least {fewest}, got {text}")
    return bounds
