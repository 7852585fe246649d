"""What has come to this front: figures for whoever sizes the pools. Pure."""

_SHARE_RATE = 0.05
"""How fast the cached share follows the requests that end."""


class TrafficMeter:
    """Counts that never fall while the front runs."""

    def __init__(self) -> None:
        """Starts at zero."""
        self.num_arrived = 0
        self._uncached_tokens = 0.0
        self._cached_share = 0.0

    @property
    def uncached_tokens(self) -> int:
        """Prompt tokens of all that arrived, less the share that lately was found in caches."""
        return int(self._uncached_tokens)

    def note_arrival(self, prompt_tokens: int) -> None:
        """Counts a request that was admitted."""
        self.num_arrived += 1
        self._uncached_tokens += prompt_tokens * (1.0 - self._cached_share)

    def note_end(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Learns from a request that ended by itself how much of a prompt is cached."""
        share = min(cached_tokens / prompt_tokens, 1.0) if prompt_tokens else 0.0
        self._cached_share += _SHARE_RATE * (share - self._cached_share)
