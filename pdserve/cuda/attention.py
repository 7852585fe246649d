"""Attention of a step: which kernel serves which rows.

Letters: M rows, H query heads, J KV heads, D head dim, S slots.
"""

from torch import Tensor

from pdserve.cuda.step_rows import StepRows
from pdserve.kernels.decode_attention import DecodeScratch, decode_attention
from pdserve.kernels.prefill_attention import prefill_attention


class AttentionRoom:
    """Attends for all rows of a step."""

    def __init__(
        self,
        scratch: DecodeScratch,
        *,
        block_size: int,
        head_dim: int,
        split_tokens: int | None,
        use_pdl: bool,
    ) -> None:
        """Keeps them.

        Args:
            scratch: of decode attention.
            block_size: of KV.
            head_dim: scores are divided by its root.
            split_tokens: KV is always cut there, so that no other sequence matters; None cuts a
                batch into equal parts.
            use_pdl: whether kernels may start while the ones before them drain.
        """
        self._split_tokens = split_tokens
        self._scratch = scratch
        self._block_size = block_size
        self._scale = head_dim**-0.5
        self._use_pdl = use_pdl

    def attend(
        self,
        q_MHD: Tensor,
        keys_SJD: Tensor,
        values_SJD: Tensor,
        rows: StepRows,
        out_MHD: Tensor,
        window: int | None,
    ) -> None:
        """Writes what each row's heads give; KV of all rows is already stored."""
        if rows.decode is not None:
            num_rows = rows.decode.lengths_B.shape[0]
            decode_attention(
                q_MHD[:num_rows],
                keys_SJD,
                values_SJD,
                rows.decode.block_tables_BW,
                rows.decode.lengths_B,
                out_MHD[:num_rows],
                self._scratch,
                block_size=self._block_size,
                scale=self._scale,
                window=window,
                split_tokens=self._split_tokens,
                use_pdl=self._use_pdl,
            )
        if rows.prompt is not None:
            part = slice(rows.prompt.first_row, rows.prompt.first_row + rows.prompt.num_rows)
            prefill_attention(
                q_MHD[part],
                keys_SJD,
                values_SJD,
                rows.prompt.block_tables_BW,
                rows.prompt.query_starts,
                rows.prompt.context_lengths_B,
                out_MHD[part],
                max_query_tokens=rows.prompt.max_query_tokens,
                block_size=self._block_size,
                scale=self._scale,
                window=window,
                use_pdl=self._use_pdl,
            )
