"""How Hopper's copy engine sees the operands and the result of a streamed product.

Letters: M rows, N outputs, K inputs, S splits of K.
"""

import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from pdserve.kernels.product_plan import ProductPlan

ALIGNMENT_BYTES = 16
SWIZZLE_BYTES = 128
RING_ITEM_BYTES = 2
MIN_BULK_ROWS = 64  # of a tile; a result of fewer is written quicker from registers


def describe_weights(weight_NK: Tensor, block_n: int, block_k: int) -> TensorDescriptor:
    """Returns tiles of weights."""
    return TensorDescriptor.from_tensor(weight_NK, [block_n, block_k], _layout(2, RING_ITEM_BYTES))


def describe_rows(x_MK: Tensor, block_m: int, block_k: int) -> TensorDescriptor:
    """Returns tiles of rows: whole ones where the memory goes on behind the last row.

    The copy engine is slow with a tile that its bounds cut off: on an H200, 192 rows in tiles of
    256 cost a step's products 20 %, 96 in tiles of 128 a tenth. What is read behind the last row
    ends up in rows of the result that nobody writes.
    """
    num_rows, num_inputs = x_MK.shape
    whole = triton.cdiv(num_rows, block_m) * block_m
    end = x_MK.storage_offset() + (whole - 1) * x_MK.stride(0) + num_inputs
    if end * x_MK.element_size() <= x_MK.untyped_storage().nbytes():
        x_MK = x_MK.as_strided((whole, num_inputs), x_MK.stride())
    return TensorDescriptor.from_tensor(x_MK, [block_m, block_k], _layout(2, RING_ITEM_BYTES))


def describe_result(out_SMN: Tensor, block_m: int, block_n: int) -> TensorDescriptor:
    """Returns tiles of the result; rows and outputs behind the last are not written."""
    layout = _layout(3, out_SMN.element_size())
    return TensorDescriptor.from_tensor(out_SMN, [1, block_m, block_n], layout)


def can_store_in_bulk(out_SMN: Tensor, plan: ProductPlan, block_m: int, num_stages: int) -> bool:
    """Returns True if the copy engine can write a tile of the result from where the ring was."""
    item_bytes = out_SMN.element_size()
    ring_bytes = num_stages * max(plan.block_n, block_m) * plan.block_k * RING_ITEM_BYTES
    return (
        block_m >= MIN_BULK_ROWS
        and plan.block_n * block_m * item_bytes <= ring_bytes
        and out_SMN.shape[2] * item_bytes % ALIGNMENT_BYTES == 0
    )


def _layout(rank: int, item_bytes: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(
        swizzle_byte_width=SWIZZLE_BYTES, element_bitwidth=8 * item_bytes, rank=rank
    )
