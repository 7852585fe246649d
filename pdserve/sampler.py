"""Chooses tokens from logits. The choice is a pure function of (logits, params, output index).

Randomness is counter-based: the noise of a token is a hash of (seed, sample index, output index,
token id), so a replay on any process draws the same noise. With Gumbel noise g the token that
maximises `logit / temperature + g` is an exact sample of the softmax (Gumbel-max; Maddison, Tarlow
and Minka, "A* Sampling", section 2).
"""

from dataclasses import dataclass

from torch import Tensor

from pdserve.request import SampledToken, SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingRow:
    """What one row of logits is sampled with."""

    params: SamplingParams
    output_index: int
    stop_ids: frozenset[int] = frozenset()
    """Cannot be chosen before `params.min_tokens` output tokens."""
    sample_index: int = 0
    """Which of several samples of one prompt."""


def sample(logits_V: Tensor, row: SamplingRow) -> SampledToken:  # noqa: N803
    """Chooses the next token.

    Args:
        logits_V: float32 [vocab_size]; not changed. NaN counts as minus infinity.
        row: how to choose.
    """
    raise NotImplementedError
