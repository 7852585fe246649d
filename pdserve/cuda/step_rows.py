"""A step as the device sees it: tensors that say what each row is. Plain data.

Rows of sequences that compute one token come first, rows of prompts behind them.

Letters: M rows, B sequences, W blocks in a table, R rows that sample.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeRows:
    """Rows [0, B): one token of a sequence each."""

    block_tables_BW: Tensor
    """int32."""
    lengths_B: Tensor
    """int32; tokens with KV, this one included; 0 is a row of padding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptChunk:
    """One prompt's rows, as the host knows them."""

    num_rows: int
    context: int
    """Tokens with KV before this step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptRows:
    """Rows behind those of decoding: several tokens of a sequence each."""

    first_row: int
    num_rows: int
    block_tables_BW: Tensor
    """int32."""
    query_starts: Tensor
    """int32 [B + 1]; rows count from `first_row`."""
    context_lengths_B: Tensor
    """int32; tokens with KV before this step."""
    max_query_tokens: int
    """Of one sequence in this step, or more: it sets the size of launches."""
    has_long_context: bool
    """Whether many tokens with KV are before some prompt."""
    chunks: tuple[PromptChunk, ...] | None = None
    """The sequences' sizes; None in a graph, which serves any sizes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRows:
    """All rows of one step."""

    token_ids_M: Tensor
    """int32."""
    positions_M: Tensor
    """int32."""
    slots_M: Tensor
    """int32; negative skips a row."""
    decode: DecodeRows | None = None
    prompt: PromptRows | None = None
    sample_rows_R: Tensor | None = None
    """int32; rows whose logits are wanted. None is all of them."""

    @property
    def num_rows(self) -> int:
        """Rows, padding included."""
        return self.token_ids_M.shape[0]
