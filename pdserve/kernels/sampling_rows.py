"""Which rows the sampling kernels serve, and the way of all others: on the CPU, counted.

Penalties, a logit bias, masked stop ids and alternatives' log-probabilities need what is not on the
device. Such rows are sampled by `pdserve.sampler` from a copy of their logits.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from pdserve.request import SampledToken
from pdserve.sampler import SamplingRow, sample


def is_plain(row: SamplingRow) -> bool:
    """Says whether the kernels choose this row's next token as the CPU would.

    A row can become plain: stop ids are masked only before `min_tokens`.
    """
    params = row.params
    has_mask = row.output_index < params.min_tokens and bool(row.stop_ids)
    has_alternatives = params.logprobs is not None and params.logprobs > 0
    return not (params.has_penalties or params.logit_bias or has_mask or has_alternatives)


class HostSampler:
    """Samples rows that are not plain; waits for their logits, so the step is not overlapped."""

    def __init__(self) -> None:
        """Starts to count."""
        self.num_sampled = 0
        """Tokens chosen here so far."""

    def sample(self, logits_RV: Tensor, rows: Mapping[int, SamplingRow]) -> dict[int, SampledToken]:
        """Chooses the next token of rows by their index; one copy from the device."""
        if not rows:
            return {}
        index = torch.tensor(list(rows), device=logits_RV.device)
        copied = logits_RV.index_select(0, index).cpu().float()
        self.num_sampled += len(rows)
        return {
            place: sample(logits, row)
            for (place, row), logits in zip(rows.items(), copied, strict=True)
        }
