"""`pdserve demo`."""


def demo() -> int:
    """Show it."""
    return 0
