"""The gate of a feed-forward layer: SiLU of one half times the other half.

Letters: M rows, I inner width, N = 2 I, S partial sums of a product split over its inputs.
"""

import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.launch import launch_options


@triton.jit
def silu_mul_kernel(
    x_ptr,
    bias_ptr,
    out_ptr,
    x_stride_s,
    x_stride_m,
    out_stride,
    num_inner,
    NUM_SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_I: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program per row and block of columns."""
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    is_inside = columns < num_inner
    gate = tl.zeros([BLOCK_I], dtype=tl.float32)
    up = tl.zeros([BLOCK_I], dtype=tl.float32)
    if HAS_BIAS:
        gate += tl.load(bias_ptr + columns, mask=is_inside, other=0).to(tl.float32)
        up += tl.load(bias_ptr + num_inner + columns, mask=is_inside, other=0).to(tl.float32)
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
    gate_at = x_ptr + row * x_stride_m + columns
    for split in tl.static_range(NUM_SPLITS):
        part_at = gate_at + split * x_stride_s
        gate += tl.load(part_at, mask=is_inside, other=0).to(tl.float32)
        up += tl.load(part_at + num_inner, mask=is_inside, other=0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * out_stride + columns, out.to(out_ptr.dtype.element_ty), mask=is_inside)


def silu_mul(
    gate_up_SMN: Tensor, out_MI: Tensor, *, bias_N: Tensor | None = None, use_pdl: bool = False
) -> None:
    """Computes silu(gate) * up.

    Args:
        gate_up_SMN: partial sums, any float dtype; the first half of N is the gate.
        out_MI: overwritten.
        bias_N: added to the sums first.
        use_pdl: launch while the kernel before still runs.
    """
    num_rows, num_inner = out_MI.shape
    assert gate_up_SMN.shape[1:] == (num_rows, 2 * num_inner)
    assert gate_up_SMN.stride(-1) == out_MI.stride(-1) == 1
    if num_rows == 0:
        return
    block = _choose_block(num_rows, num_inner)
    silu_mul_kernel[(num_rows, triton.cdiv(num_inner, block))](
        gate_up_SMN,
        gate_up_SMN if bias_N is None else bias_N,
        out_MI,
        gate_up_SMN.stride(0),
        gate_up_SMN.stride(1),
        out_MI.stride(0),
        num_inner,
        NUM_SPLITS=gate_up_SMN.shape[0],
        HAS_BIAS=bias_N is not None,
        BLOCK_I=block,
        USE_PDL=use_pdl,
        **launch_options(min(max(block // 256, 1), 4), use_pdl=use_pdl),
    )


def _choose_block(num_rows: int, num_inner: int) -> int:
    """Small blocks spread few rows over the device, large ones spare programs (H200, I 14336)."""
    block = 256 if num_rows <= 2 else 1024 if num_rows <= 128 else 2048
    return int(min(block, triton.next_power_of_2(num_inner)))
