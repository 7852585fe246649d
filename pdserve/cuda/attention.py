"""Attention of a step: which kernel serves which rows.

Letters: M rows, H query heads, J KV heads, D head dim, S slots, B prompts, T tokens of each.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from pdserve.cuda.step_rows import PromptChunk, PromptRows, StepRows
from pdserve.kernels.decode_attention import DecodeTuning, decode_attention
from pdserve.kernels.decode_scratch import DecodeScratch
from pdserve.kernels.dense_attention import (
    BUCKET_TOKENS,
    LEAST_TOKENS,
    dense_attention,
    is_dense_faster,
)
from pdserve.kernels.prefill_attention import PrefillScratch, prefill_attention
from pdserve.kernels.prefill_tuning import FEW_ROWS, LONG_CONTEXT_TOKENS, splits_for
from pdserve.kernels.streamed_attention import StreamTuning

SPLIT_ROWS = FEW_ROWS * splits_for(FEW_ROWS, LONG_CONTEXT_TOKENS)
"""Rows times splits of a launch of prompts, at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerAttention:
    """What attention of one layer reads."""

    keys_SJD: Tensor
    values_SJD: Tensor
    window: int | None
    """Tokens that a row sees; None for all."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Neighbouring prompts that one launch serves."""

    chunks: tuple[PromptChunk, ...]
    first: int
    """Place of the first prompt."""
    first_row: int
    is_dense: bool


class AttentionRoom:
    """Attends for all rows of a step."""

    def __init__(
        self,
        decode_scratch: DecodeScratch,
        prompt_scratch: PrefillScratch,
        *,
        block_size: int,
        head_dim: int,
        split_tokens: int | None,
        has_dense: bool,
        max_rows: int,
        use_pdl: bool,
    ) -> None:
        """Keeps them.

        Args:
            decode_scratch: of decode attention.
            prompt_scratch: of `SPLIT_ROWS` rows.
            block_size: of KV.
            head_dim: scores are divided by its root.
            split_tokens: KV of decoding sequences is always cut there and that of prompts never, so
                that no other sequence matters; None cuts a batch into equal parts.
            has_dense: whether long chunks may go to the library's kernel, over a copy of their KV.
            max_rows: of one step.
            use_pdl: whether kernels may start while the ones before them drain.
        """
        self.decode_tuning: DecodeTuning | StreamTuning | None = None
        """Of decode attention; None for the kernels' own choice. Not for deterministic mode."""
        self._decode_scratch = decode_scratch
        self._prompt_scratch = prompt_scratch
        self._block_size = block_size
        self._scale = head_dim**-0.5
        self._split_tokens = split_tokens
        self._has_dense = has_dense
        self._max_rows = max_rows
        self._use_pdl = use_pdl

    def attend(
        self, q_MHD: Tensor, layer: LayerAttention, rows: StepRows, out_MHD: Tensor
    ) -> Tensor:
        """Computes what each row's heads give; KV of all rows is already stored.

        Returns:
            `out_MHD`, written; or what the library's kernel has written elsewhere.
        """
        if rows.decode is None and rows.prompt is not None:
            alone = self._find_lone_dense(q_MHD, layer, rows.prompt)
            if alone is not None:
                return self._attend_dense(q_MHD, layer, rows.prompt, alone)
        if rows.decode is not None:
            decode = rows.decode
            num_rows = decode.lengths_B.shape[0]
            self._attend_tokens(
                q_MHD[:num_rows],
                layer,
                decode.block_tables_BW,
                decode.lengths_B,
                out_MHD[:num_rows],
                may_overlap=True,
            )
        if rows.prompt is not None:
            part = slice(rows.prompt.first_row, rows.prompt.first_row + rows.prompt.num_rows)
            self._attend_prompts(q_MHD[part], layer, rows.prompt, out_MHD[part])
        return out_MHD

    def _find_lone_dense(
        self, q_MHD: Tensor, layer: LayerAttention, prompt: PromptRows
    ) -> _Run | None:
        """Returns the run of a lone prompt, if the library's kernel serves it."""
        chunks = prompt.chunks
        if chunks is None or len(chunks) > 1 or layer.window is not None or not self._has_dense:
            return None
        (run,) = self._runs(q_MHD, chunks)
        return run if run.is_dense else None

    def can_attend_for_last_rows(self, rows: StepRows) -> bool:
        """Says whether all rows that sample are the last ones of prompts, one each.

        Not in deterministic mode: it keeps prompts to their kernel.
        """
        prompt, wanted = rows.prompt, rows.sample_rows_R
        if prompt is None or prompt.chunks is None or wanted is None:
            return False
        is_free = rows.decode is None and self._split_tokens is None
        return is_free and wanted.shape[0] == len(prompt.chunks)

    def attend_for_last_rows(
        self, q_BHD: Tensor, layer: LayerAttention, rows: StepRows, out_BHD: Tensor
    ) -> None:
        """Writes what the heads of each prompt's last row give."""
        prompt = rows.prompt
        assert prompt is not None
        num_rows = prompt.query_starts.diff()
        self._attend_tokens(
            q_BHD,
            layer,
            prompt.block_tables_BW,
            prompt.context_lengths_B + num_rows,
            out_BHD,
            may_overlap=False,
        )

    def _attend_tokens(
        self,
        q_BHD: Tensor,
        layer: LayerAttention,
        block_tables_BW: Tensor,
        lengths_B: Tensor,
        out_BHD: Tensor,
        *,
        may_overlap: bool,
    ) -> None:
        decode_attention(
            q_BHD,
            layer.keys_SJD,
            layer.values_SJD,
            block_tables_BW,
            lengths_B,
            out_BHD,
            self._decode_scratch,
            block_size=self._block_size,
            scale=self._scale,
            window=layer.window,
            split_tokens=self._split_tokens,
            tuning=self.decode_tuning if self._split_tokens is None else None,
            # Lengths may be the doing of the kernel just before.
            use_pdl=self._use_pdl and may_overlap,
        )

    def _attend_prompts(
        self, q_MHD: Tensor, layer: LayerAttention, prompt: PromptRows, out_MHD: Tensor
    ) -> None:
        if prompt.chunks is None or layer.window is not None or not self._has_dense:
            self._attend_paged(
                q_MHD, layer, prompt, out_MHD, slice(0, prompt.context_lengths_B.shape[0])
            )
            return
        for run in self._runs(q_MHD, prompt.chunks):
            places = slice(run.first, run.first + len(run.chunks))
            if run.is_dense:
                part = slice(run.first_row, run.first_row + run.chunks[0].num_rows)
                out_MHD[part].copy_(self._attend_dense(q_MHD[part], layer, prompt, run))
            else:
                self._attend_paged(q_MHD, layer, prompt, out_MHD, places)

    def _runs(self, q_MHD: Tensor, chunks: tuple[PromptChunk, ...]) -> Iterator[_Run]:
        """Yields neighbours that go together: one long chunk, or any number of short ones."""
        head_dim, dtype = q_MHD.shape[2], q_MHD.dtype

        def key(pair: tuple[int, PromptChunk]) -> int | None:
            index, chunk = pair
            return index if self._is_dense(chunk, head_dim, dtype) else None

        first = first_row = 0
        for kind, group in groupby(enumerate(chunks), key):
            together = tuple(chunk for _, chunk in group)
            yield _Run(together, first, first_row, kind is not None)
            first += len(together)
            first_row += sum(chunk.num_rows for chunk in together)

    def _is_dense(self, chunk: PromptChunk, head_dim: int, dtype: torch.dtype) -> bool:
        """Says whether the library's kernel is quicker and has met such sizes before.

        It takes 70 ms of the host for each new pair of lengths: so behind cached tokens only whole
        steps of a long prompt go there, and all that may go there went there at start.
        """
        if not is_dense_faster(chunk.num_rows, chunk.context, head_dim, dtype):
            return False
        if chunk.context == 0:
            return chunk.num_rows <= self._max_rows
        return chunk.num_rows == self._max_rows and chunk.context % self._max_rows == 0

    def warm_up(self, layer: LayerAttention, num_heads: int, max_model_len: int) -> int:
        """Shows the library's kernel all sizes that it will meet; returns how many those are."""
        if not self._has_dense:
            return 0
        keys = layer.keys_SJD
        contexts = range(self._max_rows, max_model_len - self._max_rows + 1, self._max_rows)
        chunks = [
            *(
                PromptChunk(num_rows=rows, context=0)
                for rows in range(LEAST_TOKENS, self._max_rows + 1, BUCKET_TOKENS)
            ),
            *(PromptChunk(num_rows=self._max_rows, context=context) for context in contexts),
        ]
        chunks = [one for one in chunks if self._is_dense(one, keys.shape[2], keys.dtype)]
        for chunk in chunks:
            shape = (1, chunk.num_rows, num_heads, keys.shape[2])
            num_blocks = -(-(chunk.context + chunk.num_rows) // self._block_size)
            dense_attention(
                torch.zeros(shape, dtype=keys.dtype, device=keys.device),
                keys,
                layer.values_SJD,
                torch.zeros((1, num_blocks), dtype=torch.int32, device=keys.device),
                context=chunk.context,
                block_size=self._block_size,
                scale=self._scale,
            )
        return len(chunks)

    def _attend_paged(
        self,
        q_MHD: Tensor,
        layer: LayerAttention,
        prompt: PromptRows,
        out_MHD: Tensor,
        places: slice,
    ) -> None:
        prefill_attention(
            q_MHD,
            layer.keys_SJD,
            layer.values_SJD,
            prompt.block_tables_BW[places],
            prompt.query_starts[places.start : places.stop + 1],
            prompt.context_lengths_B[places],
            out_MHD,
            max_query_tokens=prompt.max_query_tokens,
            block_size=self._block_size,
            scale=self._scale,
            window=layer.window,
            num_splits=self._num_splits(q_MHD.shape[0], has_long_context=prompt.has_long_context),
            scratch=self._prompt_scratch,
            use_pdl=self._use_pdl,
        )

    def _num_splits(self, num_rows: int, *, has_long_context: bool) -> int:
        """Returns into how many parts the KV of prompts is cut."""
        if self._split_tokens is not None:
            return 1
        return splits_for(num_rows, LONG_CONTEXT_TOKENS if has_long_context else 0)

    def _attend_dense(
        self, q_THD: Tensor, layer: LayerAttention, prompt: PromptRows, run: _Run
    ) -> Tensor:
        (chunk,) = run.chunks
        out_1THD = dense_attention(
            q_THD.unsqueeze(0),
            layer.keys_SJD,
            layer.values_SJD,
            prompt.block_tables_BW[run.first : run.first + 1],
            context=chunk.context,
            block_size=self._block_size,
            scale=self._scale,
        )
        return out_1THD[0]
