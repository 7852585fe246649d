"""How the router's processes run: a front, or the brain of several."""

EXIT_CONFIG = 2
"""Exit status: something the user can mend."""
GC_THRESHOLDS = (20_000, 20, 100)
"""Little of what is made per token lives long, and nothing of it is in cycles: at the usual 700
objects a collection took 10 % of the time of a token."""
BRAIN = "brain"
"""The name of what fronts share, as a process."""


def front_name(number: int) -> str:
    """Returns the name of a front among those that share a brain: in logs, and as a process."""
    return f"front-{number}"
