"""Memory that pieces of a decode launch meet in."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeScratch:
    """Partial results of pieces. Launches of one stream may share it."""

    partials: Tensor
    """float32 [max_rows * H * max_splits * D]."""
    log_sums: Tensor
    """float32 [max_rows * H * max_splits]: logarithms to base 2 of each row's sum."""
    arrivals: Tensor
    """int32 [max_rows * H]: finished pieces of a sequence and KV head; 0 between launches."""
    max_rows: int
    max_splits: int

    def splits_for(self, num_rows: int) -> int:
        """Returns into how many pieces a sequence may be cut in a launch of so many rows."""
        return self.max_splits * self.max_rows // num_rows


def make_scratch(
    max_rows: int, num_heads: int, head_dim: int, max_splits: int, device: torch.device | str
) -> DecodeScratch:
    """Allocates the scratch memory of `decode_attention`.

    Args:
        max_rows: query rows of the largest launch.
        num_heads: query heads.
        head_dim: of queries and KV.
        max_splits: pieces of a sequence when all rows are there, at least 2. Fewer rows may be cut
            further, but for splits of a fixed size.
        device: of the KV.
    """
    assert max_splits >= 2
    num_partials = max_rows * num_heads * max_splits
    return DecodeScratch(
        partials=torch.empty(num_partials * head_dim, dtype=torch.float32, device=device),
        log_sums=torch.empty(num_partials, dtype=torch.float32, device=device),
        arrivals=torch.zeros(max_rows * num_heads, dtype=torch.int32, device=device),
        max_rows=max_rows,
        max_splits=max_splits,
    )
