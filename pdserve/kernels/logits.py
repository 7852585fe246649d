"""How logits are read by the sampling kernels, and the integers that order them.

Ordered keys are the bits of a float32, so arranged that integers compare as the floats do; of a
narrower dtype only the upper `32 - SHIFT` bits are kept, without loss.
"""

import triton
import triton.language as tl

LARGEST = tl.constexpr(3.4028234663852886e38)
LEAST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def clean(values):
    """Returns float32 as `pdserve.sampler` sees it: no NaN and no infinity."""
    values = values.to(tl.float32)
    # NaN compares as false.
    values = tl.where(values > LEAST, values, LEAST)
    return tl.minimum(values, LARGEST)


@triton.jit
def load_logits(row_ptr, token_ids, vocab_size):
    """Loads cleaned logits; minus infinity behind the vocabulary."""
    is_inside = token_ids < vocab_size
    values = clean(tl.load(row_ptr + token_ids, mask=is_inside, other=0))
    return tl.where(is_inside, values, float("-inf"))


@triton.jit
def come_before(other_values, other_ids, values, token_ids):
    """Says of pairs [tokens, others] whether the other is likelier, or as likely and first."""
    is_equal = other_values[None, :] == values[:, None]
    is_first = is_equal & (other_ids[None, :] < token_ids[:, None])
    return (other_values[None, :] > values[:, None]) | is_first


@triton.jit
def ordered_key(values, SHIFT: tl.constexpr):
    """Returns an int32 that orders like the value; both zeros have one key."""
    bits = tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def key_value(key, SHIFT: tl.constexpr):
    """Returns the value of an int64 key."""
    low = tl.where(key < 0, (1 << SHIFT) - 1, 0)
    ordered = ((key << SHIFT) + low).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
