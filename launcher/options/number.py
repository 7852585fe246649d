"""Flags that are numbers: finite and within limits, and refused in one way."""

import re
from typing import Any

import typer

from pdserve.errors import ConfigError

_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")
_SHOWN = 64


def read_number(name: str, text: str, least: float, most: float) -> float:
    """Reads a number that somebody typed.

    Raises:
        ConfigError: it is none, or out of range; the text names what was typed, and the limits.
    """
    try:
        value = float(text)
    except ValueError:
        value = None
    # NaN is within no limits.
    if value is None or not least <= value <= most:
        raise _refuse(name, "a number", least, most, text)
    return value


def read_count(name: str, text: str, least: int, most: int) -> int:
    """Reads a whole number that somebody typed.

    Raises:
        ConfigError: it is none, or out of range; the text names what was typed, and the limits.
    """
    value = int(text) if _WHOLE.fullmatch(text.strip()) else None
    if value is None or not least <= value <= most:
        raise _refuse(name, "a whole number", least, most, text)
    return value


def number(flag: str, text: str, least: float, most: float, *, show_default: bool = True) -> Any:
    """Returns an option; its help shows the limits.

    Args:
        flag: with its dashes.
        text: what the number is.
        least: that it may be.
        most: that it may be.
        show_default: in the help.
    """
    return typer.Option(
        flag,
        help=text,
        metavar=f"{least:.7g}..{most:.7g}",
        # Of a default that is no text, too.
        parser=lambda typed: read_number(flag, str(typed), least, most),
        show_default=show_default,
    )


def count(flag: str, text: str, least: int, most: int, *, show_default: bool = True) -> Any:
    """Returns an option that is a whole number; otherwise as `number`."""
    return typer.Option(
        flag,
        help=text,
        metavar=f"{least}..{most}",
        parser=lambda typed: read_count(flag, str(typed), least, most),
        show_default=show_default,
    )


def _refuse(name: str, kind: str, least: float, most: float, text: str) -> ConfigError:
    return ConfigError(
        f"{name} must be {kind} from {least:.7g} to {most:.7g}, got {text[:_SHOWN]!r}"
    )
