"""Log-probabilities of prompt tokens, for the few requests that ask for them.

Letters: M rows, E hidden size, R rows at a time, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.request import RequestId, TokenLogprobs


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptTargets:
    """The tokens of one request that are scored."""

    request_id: RequestId
    first_row: int
    token_ids: tuple[int, ...]
    """Of consecutive rows: each is scored by the row before it."""
    num_top: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptScores:
    """Scores on the device; reading them waits for all that was launched."""

    targets: PromptTargets
    chosen: Tensor
    """float64 [number of targets]."""
    top_ids: Tensor
    """[number of targets, num_top]."""
    top: Tensor
    """float64, likewise."""

    def read(self) -> tuple[TokenLogprobs, ...]:
        """Returns one entry for each target."""
        rows = zip(
            self.targets.token_ids,
            self.chosen.tolist(),
            self.top_ids.tolist(),
            self.top.tolist(),
            strict=True,
        )
        return tuple(
            TokenLogprobs(
                token_id=token_id, logprob=logprob, top=tuple(zip(ids, values, strict=True))
            )
            for token_id, logprob, ids, values in rows
        )


def score_prompt(
    hidden_ME: Tensor,
    score: Callable[[Tensor], Tensor],
    targets: PromptTargets,
    max_rows: int,
) -> PromptScores:
    """Scores a request's targets, so many rows at a time as there is room for logits.

    Args:
        hidden_ME: normed rows of the step.
        score: makes logits of normed rows.
        targets: what to score.
        max_rows: at a time.
    """
    chosen: list[Tensor] = []
    top_ids: list[Tensor] = []
    top: list[Tensor] = []
    count = len(targets.token_ids)
    wanted = torch.tensor(targets.token_ids, device=hidden_ME.device)
    for start in range(0, count, max_rows):
        rows = slice(targets.first_row + start, targets.first_row + min(start + max_rows, count))
        logits_RV = score(hidden_ME[rows])
        least = torch.finfo(logits_RV.dtype).min
        raw = torch.nan_to_num(logits_RV, nan=least, neginf=least)
        logprobs = raw.double().log_softmax(1)
        part = wanted[start : start + max_rows]
        chosen.append(logprobs.gather(1, part.unsqueeze(1)).squeeze(1))
        values, ids = logprobs.topk(min(targets.num_top, logprobs.shape[1]), dim=1)
        top.append(values)
        top_ids.append(ids)
    return PromptScores(
        targets=targets,
        chosen=torch.cat(chosen),
        top_ids=torch.cat(top_ids),
        top=torch.cat(top),
    )


def score_prompts(
    hidden_ME: Tensor,
    score: Callable[[Tensor], Tensor],
    targets: Sequence[PromptTargets],
    max_rows: int,
) -> tuple[PromptScores, ...]:
    """Scores all requests of a step that ask for it."""
    return tuple(score_prompt(hidden_ME, score, one, max_rows) for one in targets)
