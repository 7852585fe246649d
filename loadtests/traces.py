"""Prompts of a published trace, to be sent when they were sent then; see `simulation.traces`."""

from loadtests.sessions import Sizes, make_ids
from simulation.workload import Arrival


def fit_prompt(request: Arrival, sizes: Sizes, scale: float) -> tuple[int, ...]:
    """Returns a prompt of that length times `scale`, at most what the model takes.

    What was shared in the trace is shared here: each piece shrinks by itself.
    """
    whole = max(1, min(round(request.num_prompt_tokens * scale), sizes.max_prompt_tokens))
    ids: list[int] = []
    end = 0
    for content, num_tokens in request.pieces:
        end += num_tokens
        ids += make_ids(f"piece {content}", round(end * scale) - len(ids), sizes)
        if len(ids) >= whole:
            break
    return tuple(ids[:whole]) or make_ids("piece", whole, sizes)
