"""Joins attention over parts of the KV by the logarithms of their sums.

Letters: S splits, M query rows, H query heads, D head dim.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

HEADS_PER_PROGRAM = 4


def merge_splits(
    partials: Tensor,
    log_sums: Tensor,
    num_valid: Tensor,
    out_MHD: Tensor,
    *,
    num_splits: int,
    use_pdl: bool = False,
) -> None:
    """Adds splits of a launch up, always in their order.

    Args:
        partials: float32, begins with [S, M, H, D]: outputs of each split.
        log_sums: float32, begins with [S, M, H]: logarithms to base 2 of each split's sum; -inf
            where a row saw nothing of a split. One split of each row at least is finite.
        num_valid: int32 [1], rows from there on are left as they are.
        out_MHD: written in place.
        num_splits: S.
        use_pdl: whether the launch may begin before the kernel ahead of it has ended (sm_90).
    """
    num_rows, num_heads, head_dim = out_MHD.shape
    assert out_MHD.stride()[1:] == (head_dim, 1)
    _merge_splits_kernel[(num_rows, triton.cdiv(num_heads, HEADS_PER_PROGRAM))](
        partials,
        log_sums,
        num_valid,
        out_MHD,
        out_MHD.stride(0),
        num_rows,
        H=num_heads,
        D=head_dim,
        D_PAD=triton.next_power_of_2(head_dim),
        SPLITS=num_splits,
        SPLITS_PAD=triton.next_power_of_2(num_splits),
        HEADS=HEADS_PER_PROGRAM,
        USE_PDL=use_pdl,
        num_warps=4,
        launch_pdl=use_pdl,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _merge_splits_kernel(
    partials_ptr,
    log_sums_ptr,
    num_valid_ptr,
    out_ptr,
    out_stride,
    num_rows,
    H: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    HEADS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    num_valid = tl.load(num_valid_ptr)
    if USE_PDL:
        gdc_wait()
        gdc_launch_dependents()
    if row >= num_valid:
        return
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    splits = tl.arange(0, SPLITS_PAD)
    offs_d = tl.arange(0, D_PAD)
    places = (splits.to(tl.int64) * num_rows + row)[:, None] * H + heads[None, :]
    exists = (splits < SPLITS)[:, None] & (heads < H)[None, :]
    log_sums = tl.load(log_sums_ptr + places, mask=exists, other=float("-inf"))
    parts = tl.load(
        partials_ptr + places[:, :, None] * D + offs_d[None, None, :],
        mask=exists[:, :, None] & (offs_d < D)[None, None, :],
        other=0.0,
    )
    top = tl.max(log_sums, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp2(log_sums - top[None, :])
    total = tl.sum(weights, 0)
    total = tl.where(total > 0.0, total, 1.0)
    out = tl.sum(parts * weights[:, :, None], 0) / total[:, None]
    tl.store(
        out_ptr + row * out_stride + heads[:, None] * D + offs_d[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=(heads < H)[:, None] & (offs_d < D)[None, :],
    )
