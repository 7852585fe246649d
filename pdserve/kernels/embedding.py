"""Looks up embeddings, together with the first norm of a model.

Letters: M rows, V vocabulary, E hidden.
"""

import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.launch import launch_options


@triton.jit
def embed_kernel(
    token_ids_ptr,
    table_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    table_stride,
    residual_stride,
    out_stride,
    num_columns,
    epsilon,
    HAS_NORM: tl.constexpr,
    BLOCK_E: tl.constexpr,
    USE_PDL: tl.constexpr,
    IS_SHARE: tl.constexpr = False,
    first_id=0,
    num_ids=0,
):
    """One program per row."""
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_E)
    is_inside = columns < num_columns
    if HAS_NORM:
        weight = tl.load(weight_ptr + columns, mask=is_inside, other=0).to(tl.float32)
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
    token_id = tl.load(token_ids_ptr + row).to(tl.int64)
    is_known = is_inside
    if IS_SHARE:
        token_id -= first_id
        is_known = is_inside & (token_id >= 0) & (token_id < num_ids)
    x = tl.load(table_ptr + token_id * table_stride + columns, mask=is_known, other=0)
    x = x.to(residual_ptr.dtype.element_ty)
    tl.store(residual_ptr + row * residual_stride + columns, x, mask=is_inside)
    if HAS_NORM:
        wide = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / num_columns + epsilon)
        out = wide * scale * weight
        tl.store(
            out_ptr + row * out_stride + columns, out.to(out_ptr.dtype.element_ty), mask=is_inside
        )


def embed(token_ids: Tensor, table_VE: Tensor, out_ME: Tensor, *, use_pdl: bool = False) -> None:
    """Writes the embedding of each token.

    Args:
        token_ids: int32 or int64 [M]; inside the table, also for padding.
        table_VE: the embeddings.
        out_ME: overwritten.
        use_pdl: launch while the kernel before still runs.
    """
    _launch(token_ids, table_VE, out_ME, None, None, 0.0, use_pdl)


def embed_share(
    token_ids: Tensor,
    table_VE: Tensor,
    first_id: int,
    out_ME: Tensor,
    *,
    use_pdl: bool = False,
) -> None:
    """Writes the embeddings of the tokens that a part of the table is for, zeros for all others.

    Args:
        token_ids: int32 or int64 [M].
        table_VE: the embeddings of tokens from `first_id` on.
        first_id: of the table.
        out_ME: overwritten.
        use_pdl: launch while the kernel before still runs.
    """
    _launch(token_ids, table_VE, out_ME, None, None, 0.0, use_pdl, first_id)


def embed_and_norm(
    token_ids: Tensor,
    table_VE: Tensor,
    residual_ME: Tensor,
    weight_E: Tensor,
    out_ME: Tensor,
    *,
    epsilon: float,
    use_pdl: bool = False,
) -> None:
    """Writes the embedding of each token to the residual stream, and its norm.

    Args:
        token_ids: int32 or int64 [M]; inside the table, also for padding.
        table_VE: the embeddings.
        residual_ME: overwritten.
        weight_E: the gain of the norm.
        out_ME: the normed rows, overwritten.
        epsilon: added to the mean square.
        use_pdl: launch while the kernel before still runs.
    """
    _launch(token_ids, table_VE, residual_ME, weight_E, out_ME, epsilon, use_pdl)


def _launch(
    token_ids: Tensor,
    table_VE: Tensor,
    residual_ME: Tensor,
    weight_E: Tensor | None,
    out_ME: Tensor | None,
    epsilon: float,
    use_pdl: bool,
    first_id: int | None = None,
) -> None:
    num_rows, num_columns = residual_ME.shape
    assert table_VE.stride(-1) == residual_ME.stride(-1) == 1
    if num_rows == 0:
        return
    block = triton.next_power_of_2(num_columns)
    embed_kernel[(num_rows,)](
        token_ids,
        table_VE,
        residual_ME,
        table_VE if weight_E is None else weight_E,
        residual_ME if out_ME is None else out_ME,
        table_VE.stride(0),
        residual_ME.stride(0),
        0 if out_ME is None else out_ME.stride(0),
        num_columns,
        epsilon,
        HAS_NORM=weight_E is not None,
        BLOCK_E=block,
        USE_PDL=use_pdl,
        IS_SHARE=first_id is not None,
        first_id=0 if first_id is None else first_id,
        num_ids=table_VE.shape[0],
        **launch_options(min(max(block // 256, 1), 16), use_pdl=use_pdl),
    )
