"""Checked reading of fields from the JSON files of a model folder."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from pdserve.errors import ConfigError

Json = Mapping[str, object]


def read_json(path: Path) -> Json:
    """Reads a file that holds one object.

    Raises:
        ConfigError: there is no such file, or it holds something else.
    """
    try:
        parsed: object = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path.parent}: no {path.name}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    if not isinstance(parsed, dict):
        raise ConfigError(f"{path}: must hold an object")
    return cast(Json, parsed)


def read_positive(raw: Json, name: str, path: Path, default: int | None = None) -> int:
    """Returns an integer of at least 1.

    Raises:
        ConfigError: it is missing and has no default, or is something else.
    """
    value = raw.get(name)
    if value is None:
        if default is None:
            raise ConfigError(f"{path}: {name} is missing")
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{path}: {name} must be an integer of at least 1, got {value!r}")
    return value


def read_number(raw: Json, name: str, path: Path, default: float | None = None) -> float:
    """Returns a number over 0.

    Raises:
        ConfigError: it is missing and has no default, or is something else.
    """
    value = raw.get(name)
    if value is None:
        if default is None:
            raise ConfigError(f"{path}: {name} is missing")
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise ConfigError(f"{path}: {name} must be a number over 0, got {value!r}")
    return float(value)


def read_flag(raw: Json, name: str, path: Path, *, default: bool = False) -> bool:
    """Returns a boolean.

    Raises:
        ConfigError: it is something else.
    """
    value = raw.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ConfigError(f"{path}: {name} must be true or false, got {value!r}")
    return value


def read_optional_id(raw: Json, name: str, path: Path) -> int | None:
    """Returns a token id, or None if there is none.

    Raises:
        ConfigError: it is something else.
    """
    value = raw.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError(f"{path}: {name} must be a token id, got {value!r}")
    return value
