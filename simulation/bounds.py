"""What a workload needs at least, from a profile's laws alone: where a search for pools begins."""

from collections.abc import Iterator

from pdserve.predictor.profile import Profile
from simulation.workload import Arrival, Workload

_FILL = 0.8
"""Share of a cache that running sequences take at most, on average."""


def hopeless_share(workload: Workload, profile: Profile, ttft_s: float) -> float:
    """Returns the share of requests that cannot keep a TTFT even on idle workers.

    All that was asked before counts as cached.
    """
    hopeless = sum(
        alone_s(profile, uncached, one.num_prompt_tokens - uncached) > ttft_s
        for one, uncached in split_uncached(workload)
    )
    return hopeless / max(len(workload.arrivals), 1)


def lower_bounds(workload: Workload, profile: Profile) -> tuple[float, float]:
    """Returns how many workers of each pool the workload keeps busy, if nothing is ever idle.

    Prefill computes each prefix once. Decode reads each token's context once a step, in batches
    that are as large as a worker takes, and holds it for as long as that takes.
    """
    seconds = max(workload.duration_s, 1e-9)
    fixed, per_sequence, per_token = profile.decode
    prefill_s = decode_s = held_token_s = 0.0
    for one, uncached in split_uncached(workload):
        output = one.num_output_tokens
        prefill_s += _shared_s(profile, uncached, one.num_prompt_tokens - uncached)
        context = one.num_prompt_tokens + output / 2
        decode_s += output * (per_sequence + per_token * context)
        held_token_s += output * context
    held_tokens = profile.kv_tokens * _FILL
    batch = max(1.0, min(profile.max_num_seqs, held_tokens / _mean_context(workload)))
    decode_s += workload.num_output_tokens * fixed / batch
    # A sequence holds its context for as many steps as it has tokens, each as long as a full one.
    full_step_s = fixed + batch * per_sequence + per_token * held_tokens
    held = held_token_s * full_step_s / (held_tokens * seconds)
    return prefill_s / seconds, min(max(decode_s / seconds, held), 2 * decode_s / seconds)


def split_uncached(workload: Workload) -> Iterator[tuple[Arrival, int]]:
    """Walks over requests with the tokens of each that nobody has computed before."""
    seen: set[int] = set()
    for one in workload.arrivals:
        cached = prefix = 0
        is_known = True
        for piece in one.pieces:
            prefix = hash((prefix, piece))
            is_known = is_known and prefix in seen
            cached += piece.num_tokens if is_known else 0
            seen.add(prefix)
        yield one, max(1, one.num_prompt_tokens - cached)


def _shared_s(profile: Profile, uncached: int, cached: int) -> float:
    """Returns a prompt's time in steps that are full of prompts."""
    fixed, per_token, per_pair = profile.prefill
    share = uncached / profile.max_num_batched_tokens
    return fixed * share + uncached * (per_token + per_pair * (cached + uncached / 2))


def alone_s(profile: Profile, uncached: int, cached: int) -> float:
    """Returns a prompt's time in steps of its own."""
    fixed, per_token, per_pair = profile.prefill
    num_steps = -(-uncached // profile.max_num_batched_tokens)
    return fixed * num_steps + uncached * (per_token + per_pair * (cached + uncached / 2))


def _mean_context(workload: Workload) -> float:
    count = max(len(workload.arrivals), 1)
    return max(1.0, (workload.num_prompt_tokens + workload.num_output_tokens / 2) / count)
