"""Frequencies of rotary embeddings under each kind of scaling, computed as transformers does.

Letters: D head dim.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.config.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    RopeScaling,
    YarnScaling,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Frequencies:
    """What a rotary table is made from."""

    inverse: Tensor
    """float32 [D / 2], radians per position."""
    attention_factor: float = 1.0
    """Cosines and sines are multiplied by it."""


def make_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Frequencies:
    """Returns the frequencies of sequences as long as the model was made for."""
    inverse = _plain(head_dim, theta)
    match scaling:
        case LinearScaling():
            return Frequencies(inverse=inverse / scaling.factor)
        case Llama3Scaling():
            return Frequencies(inverse=_llama3(inverse, scaling))
        case YarnScaling():
            inverse = _yarn(head_dim, theta, scaling)
            return Frequencies(inverse=inverse, attention_factor=scaling.attention_factor)
        case _:
            return Frequencies(inverse=inverse)


def stretch_frequencies(
    head_dim: int, theta: float, scaling: DynamicScaling, num_tokens: int
) -> Tensor:
    """Returns the frequencies of one sequence longer than the original context.

    The base is computed in float32, as transformers does from its tensor of positions.
    """
    original = scaling.original_max_position
    length = torch.tensor(max(num_tokens, original))
    growth = (scaling.factor * length / original) - (scaling.factor - 1)
    return _plain(head_dim, theta * growth ** (head_dim / (head_dim - 2)))


def _plain(head_dim: int, theta: float | Tensor) -> Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    inverse: Tensor = 1.0 / (theta**exponents)
    return inverse


def _llama3(inverse: Tensor, scaling: Llama3Scaling) -> Tensor:
    original, factor = scaling.original_max_position, scaling.factor
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths = 2 * math.pi / inverse
    is_low = wavelengths > original / low
    is_high = wavelengths < original / high
    kept = torch.where(is_low, inverse / factor, inverse)
    smooth = (original / wavelengths - low) / (high - low)
    blended = (1 - smooth) * kept / factor + smooth * kept
    return torch.where(~is_low & ~is_high, blended, kept)


def _yarn(head_dim: int, theta: float, scaling: YarnScaling) -> Tensor:
    def dimension_at(num_rotations: float) -> float:
        turns = scaling.original_max_position / (num_rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(theta))

    low, high = dimension_at(scaling.beta_fast), dimension_at(scaling.beta_slow)
    if scaling.has_whole_borders:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    wavelengths = theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    extrapolated, interpolated = 1.0 / wavelengths, 1.0 / (scaling.factor * wavelengths)
    return interpolated * (1 - kept) + extrapolated * kept
