"""What a request asks of the workers, in tokens."""

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from router.fleet import IntArray
from router.worker_key import WorkerKey

_NO_ROWS: IntArray = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """What a request asks for, in tokens."""

    num_tokens: int
    """To be in the cache when decoding begins."""
    num_growth_tokens: int = 0
    """Output that may still come, of one sample."""
    num_expected_tokens: int = 0
    """Output that probably comes, of one sample."""
    num_samples: int = 1
    cached_rows: IntArray = field(default_factory=lambda: _NO_ROWS)
    """Of workers that probably have a prefix."""
    cached_tokens: IntArray = field(default_factory=lambda: _NO_ROWS)
    """Its tokens, one number a row."""
    max_local_tokens: int = 0
    """Most uncached tokens that a decode worker may prefill itself; 0: always hand off."""
    has_prefill_pool: bool = True
    """There is, or was, one; without it every prompt is local."""
    tpot_slo_s: float | None = None
    """Wanted seconds per output token."""
    ttft_slo_s: float | None = None
    """Wanted seconds from now to the first token."""
    excluded: Collection[WorkerKey] = ()

    @property
    def num_kv_tokens(self) -> float:
        """Tokens that it will hold on decode, on average over its life."""
        return self.num_tokens + self.num_samples * self.num_expected_tokens // 2
