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
    rows = fleet.usable(role, (), now_s).nonzero()[0]
    if not len(rows):
        return True
    work = fleet.queue[:2, rows] + fleet.others_queue[:2, rows]
    is_short = work[0] < PROMPTS_AHEAD
    is_short |= work[1] < STEPS_AHEAD * fleet.chunk_tokens[rows]
    return bool(is_short.any())
