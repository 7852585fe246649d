"""Reads the rotary embeddings of a model from its config.json, old layout or new."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from pdserve.config.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    RopeScaling,
    YarnScaling,
)
from pdserve.errors import ConfigError
from pdserve.models.config_json import Json, read_flag, read_number, read_positive

ORIGINAL_LENGTH = "original_max_position_embeddings"
SCALINGS = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """What config.json says of rotary embeddings."""

    theta: float
    scaling: RopeScaling | None
    max_position: int
    """Longest context in tokens, scaling included."""


def read_rope_config(raw: Json, path: Path, default_theta: float) -> RopeConfig:
    """Reads base, scaling and length.

    The fields lie in `rope_parameters` (transformers 5) or in `rope_scaling` and at the top level
    (before); `rope_scaling` wins where both are given, as it does in transformers.

    Raises:
        ConfigError: the kind of scaling is not supported, or a field is missing or wrong.
    """
    limit = read_positive(raw, "max_position_embeddings", path)
    theta = read_number(raw, "rope_theta", path, default=default_theta)
    name, fields = _find_fields(raw, path)
    theta = read_number(fields, "rope_theta", path, default=theta)
    kind = fields.get("rope_type", fields.get("type", "default"))
    if kind not in SCALINGS:
        known = ", ".join(SCALINGS)
        raise ConfigError(f"{path}: {name}: rope scaling {kind!r} is not supported; known: {known}")
    if fields.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(f"{path}: {name}: partial_rotary_factor must be 1.0")
    if kind == "default":
        return RopeConfig(theta=theta, scaling=None, max_position=limit)
    original = read_positive(fields, ORIGINAL_LENGTH, path, default=limit)
    # At the top level it wins, as in transformers; only these two kinds know it.
    original = read_positive(raw, ORIGINAL_LENGTH, path, default=original)
    if kind == "llama3":
        return RopeConfig(
            theta=theta, scaling=_read_llama3(fields, original, path), max_position=limit
        )
    if kind == "yarn":
        yarn = _read_yarn(fields, original, limit, path)
        longest = max(limit, int(original * yarn.factor))
        return RopeConfig(theta=theta, scaling=yarn, max_position=longest)
    factor = _read_factor(fields, path)
    scaling = (
        LinearScaling(factor=factor)
        if kind == "linear"
        else DynamicScaling(factor=factor, original_max_position=limit)
    )
    # These two name the length before scaling.
    return RopeConfig(theta=theta, scaling=scaling, max_position=int(limit * factor))


def _find_fields(raw: Json, path: Path) -> tuple[str, Json]:
    for name in ("rope_scaling", "rope_parameters"):
        fields = raw.get(name)
        if not fields:
            continue
        if not isinstance(fields, Mapping):
            raise ConfigError(f"{path}: {name} must be an object, got {fields!r}")
        if any(isinstance(value, Mapping) for value in fields.values()):
            raise ConfigError(f"{path}: {name} per kind of layer is not supported")
        return name, cast(Json, fields)
    return "rope_parameters", {}


def _read_factor(fields: Json, path: Path) -> float:
    factor = read_number(fields, "factor", path)
    if factor < 1:
        raise ConfigError(f"{path}: the factor of rope scaling must be at least 1, got {factor}")
    return factor


def _read_llama3(fields: Json, original: int, path: Path) -> Llama3Scaling:
    low = read_number(fields, "low_freq_factor", path)
    high = read_number(fields, "high_freq_factor", path)
    if high <= low:
        raise ConfigError(f"{path}: high_freq_factor must exceed low_freq_factor {low}, got {high}")
    return Llama3Scaling(
        factor=_read_factor(fields, path),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position=original,
    )


def _read_yarn(fields: Json, original: int, limit: int, path: Path) -> YarnScaling:
    if fields.get("factor") is None:
        factor = max(1.0, limit / original)
    else:
        factor = _read_factor(fields, path)
    scale, scale_all = (
        read_number(fields, name, path) if fields.get(name) else None
        for name in ("mscale", "mscale_all_dim")
    )
    if fields.get("attention_factor") is not None:
        attention_factor = read_number(fields, "attention_factor", path)
    elif scale is not None and scale_all is not None:
        attention_factor = _magnitude(factor, scale) / _magnitude(factor, scale_all)
    else:
        attention_factor = _magnitude(factor, 1.0)
    return YarnScaling(
        factor=factor,
        original_max_position=original,
        attention_factor=attention_factor,
        beta_fast=read_number(fields, "beta_fast", path, default=32.0),
        beta_slow=read_number(fields, "beta_slow", path, default=1.0),
        has_whole_borders=read_flag(fields, "truncate", path, default=True),
    )


def _magnitude(factor: float, weight: float) -> float:
    """Returns the growth of logits that offsets longer contexts (YaRN, equation 22)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
