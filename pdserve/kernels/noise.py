"""The noise of `pdserve.sampler`, bit by bit: SplitMix64 over seed, indices and token id.

`log2_exponential` is a quick float32 stand-in that is right to about 1e-4. Tokens whose quick
score is within `SCORE_MARGIN` of the best are compared in float64 as on the CPU, so the choice is
the same.
"""

import triton
import triton.language as tl

GOLDEN_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
MIX_2 = tl.constexpr(0x94D049BB133111EB)
LOG2_E = tl.constexpr(1.4426950408889634)
SCORE_MARGIN = tl.constexpr(0.002)
"""In units of log2; several times what quick scores of possible winners can be wrong by."""
MAX_SCALE = tl.constexpr(1e30)
IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
NO_ID = tl.constexpr(0x7FFFFFFF)


@triton.jit
def mix(state):
    """Scrambles 64 bits: the output function of SplitMix64 (Steele, Lea and Flood, 2014)."""
    state = (state ^ (state >> 30)) * MIX_1
    state = (state ^ (state >> 27)) * MIX_2
    return state ^ (state >> 31)


@triton.jit
def noise_key(seed, sample_index, output_index):
    """Returns what the noise of a row's tokens has in common; int64 scalars, 64 bits used."""
    key = seed.to(tl.uint64, bitcast=True)
    key = mix(key + (sample_index + 1).to(tl.uint64) * GOLDEN_GAMMA)
    return mix(key + (output_index + 1).to(tl.uint64) * GOLDEN_GAMMA)


@triton.jit
def noise_bits(key, token_ids):
    """Returns 64 random bits per token."""
    return mix(key + (token_ids + 1).to(tl.uint64) * GOLDEN_GAMMA)


@triton.jit
def log_exponential(bits):
    """Returns the logarithm of the exponential variate of some bits, float64."""
    uniform = ((bits >> 12).to(tl.int64).to(tl.float64) + 0.5) * 2.220446049250313e-16
    return tl.log(-tl.log(uniform))


@triton.jit
def quick_log2(x):
    """Returns log2 to about 22 bits; the library's own is a polynomial of twice the time."""
    if IS_INTERPRETED:
        return tl.log2(x)
    return tl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def log2_exponential(bits):
    """Returns a quick log2 of the exponential variate, less a constant, float32."""
    is_high = bits.to(tl.int64, bitcast=True) < 0
    # Of a uniform number and one less it the smaller, for its relative precision. Two conversions
    # of 32 bits are quicker than one of 64.
    folded = tl.where(is_high, bits ^ 0xFFFFFFFFFFFFFFFF, bits)
    upper = (folded >> 32).to(tl.int32).to(tl.float32)
    lower = ((folded >> 12).to(tl.int32) & 0xFFFFF).to(tl.float32)
    small = upper * 2.3283064365386963e-10 + (
        lower * 2.220446049250313e-16 + 1.1102230246251565e-16
    )
    plain = -quick_log2(tl.where(is_high, 1 - small, small))
    series = small * (1 + small * (0.5 + small * (0.33333333 + small * 0.25))) * LOG2_E
    return quick_log2(tl.where(is_high & (small < 0.015625), series, plain))


@triton.jit
def exact_score(values, reference, temperature, bits):
    """Returns the logarithm of what the CPU maximises, float64."""
    scaled = (values.to(tl.float64) - reference.to(tl.float64)) / temperature
    return scaled - log_exponential(bits)


@triton.jit
def draw_exactly(values, token_ids, is_kept, reference, temperature, key):
    """Returns the token that wins the race among those that are kept, in float64 as on the CPU."""
    scores = exact_score(values, reference, temperature, noise_bits(key, token_ids))
    scores = tl.where(is_kept, scores, float("-inf"))
    best = tl.max(scores, axis=0)
    return tl.min(tl.where(scores == best, token_ids, NO_ID), axis=0)


@triton.jit
def race(values, token_ids, reference, temperature, key):
    """Runs the exponential race among the tokens of a tile.

    Args:
        values: float32 logits; minus infinity for tokens that do not take part.
        token_ids: int32.
        reference: float32, the greatest of the values or more.
        temperature: float64, over 0.
        key: of `noise_key`.

    Returns:
        The token that wins, and its score (float64). Minus infinity if no token took part.
    """
    scale = tl.minimum(1.4426950408889634 / temperature, MAX_SCALE).to(tl.float32)
    quick = (values - reference) * scale - log2_exponential(noise_bits(key, token_ids))
    quick = tl.where(values > float("-inf"), quick, float("-inf"))
    best = tl.max(quick, axis=0)
    limit = best - SCORE_MARGIN
    winner = tl.min(tl.where(quick == best, token_ids, NO_ID), axis=0)
    winner_score = temperature * 0 + float("-inf")
    while (best >= limit) & (best > float("-inf")):
        candidate = tl.min(tl.where(quick == best, token_ids, NO_ID), axis=0)
        value = tl.max(tl.where(token_ids == candidate, values, float("-inf")), axis=0)
        score = exact_score(value, reference, temperature, noise_bits(key, candidate))
        winner = tl.where(score > winner_score, candidate, winner)
        winner_score = tl.maximum(score, winner_score)
        quick = tl.where(token_ids == candidate, float("-inf"), quick)
        best = tl.max(quick, axis=0)
    return winner, winner_score
