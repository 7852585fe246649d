"""Matrix products of few rows, weights read at memory speed: the launcher and portable kernels.

Letters: M rows, N outputs, K inputs, S splits of K. Weights are [N, K], row-major, as checkpoints
hold them. K may be split: then float32 partial sums [S, M, N] come out and the consumer adds them
up in the order of S, without atomics. A row's result depends on the plan, never on M or on other
rows. On Hopper the streamed kernel of `streamed_product` does the work.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pdserve.kernels.copy_engine import (
    can_store_in_bulk,
    describe_result,
    describe_rows,
    describe_weights,
)
from pdserve.kernels.product_plan import MAX_ROW_KERNEL_ROWS, ProductPlan, pad_rows
from pdserve.kernels.streamed_product import streamed_product_kernel

MAX_STREAMED_ROWS = 256  # columns of one tensor core instruction
MAX_RING_BYTES = 224 * 1024  # of 227 KiB of shared memory a multiprocessor of sm_90
MAX_SUMS_PER_THREAD = 128  # float32 accumulators; more of them would spill
MAX_STREAMED_WARPS = 8
MAX_TILED_ROWS = 128


@triton.jit(do_not_specialize=["num_rows", "num_outputs", "num_splits", "num_k_blocks"])
def _row_product_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    num_outputs,
    num_inputs,
    x_stride,
    weight_stride,
    num_splits,
    num_k_blocks,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Multiplies in float32 registers; each thread keeps the next weights in flight."""
    if USE_PDL:
        gdc_launch_dependents()
    split = tl.program_id(0) % num_splits
    n = tl.program_id(0) // num_splits * BLOCK_N + tl.arange(0, BLOCK_N)
    k_begin = num_k_blocks * split // num_splits
    k_end = num_k_blocks * (split + 1) // num_splits
    k = tl.arange(0, BLOCK_K)
    has_output = (n < num_outputs)[:, None]
    weight_rows = weight_ptr + n.to(tl.int64)[:, None] * weight_stride
    inputs = k_begin * BLOCK_K + k
    weights = tl.load(
        weight_rows + inputs[None, :],
        mask=has_output & (inputs < num_inputs)[None, :],
        other=0.0,
    )
    if USE_PDL:
        gdc_wait()
    m = tl.arange(0, BLOCK_M)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k_block in range(k_begin, k_end):
        inputs = k_block * BLOCK_K + k
        next_inputs = inputs + BLOCK_K
        next_weights = tl.load(
            weight_rows + next_inputs[None, :],
            mask=has_output & (next_inputs < num_inputs)[None, :] & (k_block + 1 < k_end),
            other=0.0,
        )
        factors = weights.to(tl.float32)
        for row in tl.static_range(BLOCK_M):
            x = tl.load(
                x_ptr + row * x_stride + inputs,
                mask=(inputs < num_inputs) & (row < num_rows),
                other=0.0,
            )
            sums = tl.sum(factors * x.to(tl.float32)[None, :], axis=1)
            acc += tl.where((m == row)[:, None], sums[None, :], 0.0)
        weights = next_weights
    tl.store(
        out_ptr + ((split * num_rows + m).to(tl.int64) * num_outputs)[:, None] + n[None, :],
        acc.to(out_ptr.dtype.element_ty),
        mask=(m < num_rows)[:, None] & (n < num_outputs)[None, :],
    )


@triton.jit(
    do_not_specialize=["num_rows", "num_outputs", "num_splits", "num_k_blocks", "num_m_tiles"]
)
def _tiled_product_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    num_outputs,
    num_inputs,
    x_stride,
    weight_stride,
    num_splits,
    num_k_blocks,
    num_m_tiles,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Multiplies on tensor cores, the weight tile first, so that few rows cost few columns."""
    if USE_PDL:
        gdc_launch_dependents()
    m_tile = tl.program_id(0) % num_m_tiles
    rest = tl.program_id(0) // num_m_tiles
    split = rest % num_splits
    n = rest // num_splits * BLOCK_N + tl.arange(0, BLOCK_N)
    m = m_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    weight_rows = weight_ptr + n.to(tl.int64)[:, None] * weight_stride
    x_rows = x_ptr + m.to(tl.int64)[None, :] * x_stride
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if USE_PDL:
        gdc_wait()
    k_begin = num_k_blocks * split // num_splits
    for k_block in range(k_begin, num_k_blocks * (split + 1) // num_splits):
        inputs = k_block * BLOCK_K + k
        weights = tl.load(
            weight_rows + inputs[None, :],
            mask=(n < num_outputs)[:, None] & (inputs < num_inputs)[None, :],
            other=0.0,
        )
        x = tl.load(
            x_rows + inputs[:, None],
            mask=(m < num_rows)[None, :] & (inputs < num_inputs)[:, None],
            other=0.0,
        )
        acc = tl.dot(weights, x, acc, input_precision="ieee")
    tl.store(
        out_ptr + ((split * num_rows + m).to(tl.int64) * num_outputs)[None, :] + n[:, None],
        acc.to(out_ptr.dtype.element_ty),
        mask=(m < num_rows)[None, :] & (n < num_outputs)[:, None],
    )


@dataclass(frozen=True, slots=True)
class _Launch:
    """A kernel with all that it is launched with."""

    kernel: Any
    num_programs: int
    arguments: tuple[Any, ...]
    options: dict[str, Any]


def small_product(
    x_MK: Tensor,
    weight_NK: Tensor,
    out_SMN: Tensor,
    plan: ProductPlan,
    *,
    use_pdl: bool = False,
) -> None:
    """Computes x @ weight^T, cut up as `plan` says; with a gated plan silu(gate) * up of it.

    Args:
        x_MK: rows, contiguous along K.
        weight_NK: weights of the same dtype, contiguous along K; for a gated plan 2N of them, the
            gate's before the others.
        out_SMN: contiguous float32 partial sums; with one split any float dtype.
        plan: tiles, splits and the kernel.
        use_pdl: launches before the previous kernel of the stream has ended; it must have called
            `griddepcontrol.launch_dependents`, and only x may depend on it.

    Raises:
        ValueError: shapes, strides or dtypes do not go together, or the plan does not fit them.
    """
    found = _prepare(x_MK, weight_NK, out_SMN, plan, use_pdl)
    found.kernel[(found.num_programs,)](*found.arguments, **found.options)


def compile_product(
    x_MK: Tensor,
    weight_NK: Tensor,
    out_SMN: Tensor,
    plan: ProductPlan,
    *,
    use_pdl: bool = False,
) -> None:
    """Compiles what `small_product` would launch. Several threads may, unlike the first launch.

    Triton 3.6 loads what launches a kernel as an extension module of one name. A second load from
    the same file returns the module that is there, changed: a thread that loads beside another one
    may take the launcher of the other's kernel.
    """
    found = _prepare(x_MK, weight_NK, out_SMN, plan, use_pdl)
    found.kernel.warmup(*found.arguments, grid=(found.num_programs,), **found.options)


def _prepare(
    x_MK: Tensor, weight_NK: Tensor, out_SMN: Tensor, plan: ProductPlan, use_pdl: bool
) -> _Launch:
    _check(x_MK, weight_NK, out_SMN, plan)
    if plan.kernel in ("streamed", "gated"):
        return _prepare_streamed(x_MK, weight_NK, out_SMN, plan, use_pdl)
    num_rows, num_inputs = x_MK.shape
    num_outputs = weight_NK.shape[0]
    num_n_tiles = triton.cdiv(num_outputs, plan.block_n)
    shared: dict[str, Any] = {
        "BLOCK_N": plan.block_n,
        "BLOCK_K": plan.block_k,
        "USE_PDL": use_pdl,
        "num_warps": plan.num_warps,
        "num_stages": plan.num_stages,
        "launch_pdl": use_pdl,
    }
    sizes = (
        num_rows,
        num_outputs,
        num_inputs,
        x_MK.stride(0),
        weight_NK.stride(0),
        plan.num_splits,
        triton.cdiv(num_inputs, plan.block_k),
    )
    if plan.kernel == "row":
        shared["BLOCK_M"] = pad_rows(num_rows, 1, MAX_ROW_KERNEL_ROWS)
        return _Launch(
            _row_product_kernel,
            num_n_tiles * plan.num_splits,
            (x_MK, weight_NK, out_SMN, *sizes),
            shared,
        )
    block_m = pad_rows(num_rows, 16, MAX_TILED_ROWS)
    num_m_tiles = triton.cdiv(num_rows, block_m)
    shared["num_warps"] = max(plan.num_warps, plan.block_n * block_m // (32 * 64))
    if x_MK.is_cuda:
        utils = triton.runtime.driver.active.utils
        limit = utils.get_device_properties(x_MK.device.index)["max_shared_mem"]
        stage_bytes = (plan.block_n + block_m) * plan.block_k * x_MK.element_size()
        shared["num_stages"] = max(1, min(plan.num_stages, limit // stage_bytes))
    shared["BLOCK_M"] = block_m
    return _Launch(
        _tiled_product_kernel,
        num_n_tiles * plan.num_splits * num_m_tiles,
        (x_MK, weight_NK, out_SMN, *sizes, num_m_tiles),
        shared,
    )


def _prepare_streamed(
    x_MK: Tensor,
    weight_NK: Tensor,
    out_SMN: Tensor,
    plan: ProductPlan,
    use_pdl: bool,
) -> _Launch:
    num_rows, num_inputs = x_MK.shape
    num_outputs = out_SMN.shape[2]
    is_gated = plan.kernel == "gated"
    tile_weights = plan.block_n * (2 if is_gated else 1)
    max_sums = 32 * MAX_STREAMED_WARPS * MAX_SUMS_PER_THREAD
    fewest_rows = 8 * max(1, 16 * plan.num_warps // plan.block_n)
    block_m = pad_rows(num_rows, fewest_rows, min(MAX_STREAMED_ROWS, max_sums // tile_weights))
    # Neither stages nor warps nor tiles change a bit of the result, so all follow the rows.
    stage_bytes = (tile_weights + block_m) * plan.block_k * x_MK.element_size()
    num_stages = min(plan.num_stages, MAX_RING_BYTES // stage_bytes)
    num_warps = max(plan.num_warps, tile_weights * block_m // (32 * MAX_SUMS_PER_THREAD))
    num_m_tiles = triton.cdiv(num_rows, block_m)
    num_units = triton.cdiv(num_outputs, plan.block_n) * plan.num_splits * num_m_tiles
    num_programs = num_units
    if plan.programs_per_sm is not None:
        num_sms = torch.cuda.get_device_properties(x_MK.device).multi_processor_count
        num_programs = min(num_units, plan.programs_per_sm * num_sms)
    has_bulk_store = num_programs == num_units and can_store_in_bulk(
        out_SMN, plan, block_m, num_stages
    )
    x_desc = describe_rows(x_MK, block_m, plan.block_k)
    arguments = (
        describe_weights(weight_NK, plan.block_n, plan.block_k),
        x_desc,
        describe_result(out_SMN, block_m, plan.block_n) if has_bulk_store else x_desc,
        out_SMN,
        num_rows,
        num_outputs,
        plan.num_splits,
        triton.cdiv(num_inputs, plan.block_k),
        num_m_tiles,
        num_units,
    )
    options = {
        "BLOCK_N": plan.block_n,
        "BLOCK_M": block_m,
        "BLOCK_K": plan.block_k,
        "NUM_STAGES": num_stages,
        "IS_GATED": is_gated,
        "HAS_BULK_STORE": has_bulk_store,
        "USE_PDL": use_pdl,
        "num_warps": num_warps,
        "launch_pdl": use_pdl,
    }
    return _Launch(streamed_product_kernel, num_programs, arguments, options)


def _check(x_MK: Tensor, weight_NK: Tensor, out_SMN: Tensor, plan: ProductPlan) -> None:
    num_rows, num_inputs = x_MK.shape
    num_outputs = weight_NK.shape[0]
    if plan.kernel == "gated":
        if num_outputs % 2:
            raise ValueError(f"a gated product needs a weight of two halves, got {num_outputs}")
        num_outputs //= 2
    if weight_NK.shape[1] != num_inputs:
        raise ValueError(f"weight has {weight_NK.shape[1]} inputs, x has {num_inputs}")
    expected = (plan.num_splits, num_rows, num_outputs)
    if tuple(out_SMN.shape) != expected or not out_SMN.is_contiguous():
        raise ValueError(f"out must be contiguous {expected}, got {tuple(out_SMN.shape)}")
    if plan.num_splits > 1 and out_SMN.dtype != torch.float32:
        raise ValueError(f"partial sums must be float32, got {out_SMN.dtype}")
    if x_MK.dtype != weight_NK.dtype:
        raise ValueError(f"x is {x_MK.dtype}, weight is {weight_NK.dtype}")
    if x_MK.stride(1) != 1 or weight_NK.stride(1) != 1:
        raise ValueError("x and weight must be contiguous along their inputs")
    if plan.num_splits > triton.cdiv(num_inputs, plan.block_k):
        raise ValueError(
            f"{plan.num_splits} splits need as many blocks of {plan.block_k} inputs, "
            f"got {num_inputs} inputs"
        )
    if plan.kernel == "row" and num_rows > MAX_ROW_KERNEL_ROWS:
        raise ValueError(f"the row kernel takes {MAX_ROW_KERNEL_ROWS} rows, got {num_rows}")
    if plan.kernel in ("streamed", "gated"):
        if x_MK.dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"the {plan.kernel} kernel takes 16-bit floats, got {x_MK.dtype}")
        if x_MK.stride(0) % 8 or weight_NK.stride(0) % 8:
            raise ValueError(
                "the copy engine needs rows that start at multiples of 16 bytes, got strides "
                f"{x_MK.stride(0)} and {weight_NK.stride(0)}"
            )
