"""How many servers keep a queue short: the Erlang C formula, widened to other service times.

The wait of M/G/c is taken as that of M/M/c times (1 + cv^2) / 2 (Lee and Longton, 1959), which is
exact for one server.
"""

from math import exp

MAX_SERVERS = 100_000


def servers_needed(
    offered: float,
    service_s: float,
    budget_s: float,
    *,
    tail: float,
    utilization: float,
    variability: float = 1.0,
) -> int:
    """Returns the fewest servers of which no more than `tail` of requests wait past `budget_s`.

    Args:
        offered: seconds of work that arrive per second.
        service_s: mean seconds of one request.
        budget_s: how long a request may wait; without any, only the utilization counts.
        tail: share of requests that may wait longer.
        utilization: busy for no more than this share of the time.
        variability: square of the service times' deviation over their mean.
    """
    if offered <= 0:
        return 0
    blocked = 1.0
    for count in range(1, MAX_SERVERS):
        # Erlang B by its recursion: blocked(c) = a blocked(c-1) / (c + a blocked(c-1)).
        blocked = offered * blocked / (count + offered * blocked)
        if count * utilization < offered:
            continue
        if budget_s <= 0 or service_s <= 0:
            return count
        waits = count * blocked / (count - offered * (1.0 - blocked))
        spread = service_s * (1.0 + variability) / 2.0
        if waits * exp(-(count - offered) * budget_s / spread) <= tail:
            return count
    return MAX_SERVERS
