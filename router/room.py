"""When workers have so little to do that one more request may be sent to them. Pure."""

from pdserve.request import Role
from router.fleet import Fleet

STEPS_AHEAD = 2.0
"""So many full steps of work are sent to a worker ahead."""
PROMPTS_AHEAD = 2.0
"""And so many prompts, however long."""
LOOK_AGAIN_S = 0.05
"""Workers that come make room as well, and tell nobody that waits."""


def has_room(fleet: Fleet, role: Role, now_s: float) -> bool:
    """Says whether a worker of a pool would soon be idle, or none is there to wait for."""
    is_usable = fleet.usable(role, (), now_s)
    num_prompts, num_tokens = fleet.queue[0] + fleet.others_queue[0], fleet.queue[1]
    is_short = num_prompts < PROMPTS_AHEAD
    is_short |= num_tokens + fleet.others_queue[1] < STEPS_AHEAD * fleet.chunk_tokens
    is_short &= is_usable
    return bool(is_short.any()) or not is_usable.any()
