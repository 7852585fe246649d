"""How values lie in a frame: plainly, or as fp8 with scales.

An fp8 frame holds its values as e4m3, then one float32 scale for each head of each token, in the
same order. Rounding costs up to 1/16 of a value; of random data, 3 % of its norm.
"""

import math

import torch
from torch import Tensor

from pdserve.config.shape import SCALED_DTYPE, count_value_bytes

FRAME_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    SCALED_DTYPE: torch.float8_e4m3fn,
}
"""Of the values in a frame."""
MAX_SCALED = 448.0
PER_SCALED = 1 / MAX_SCALED


def encode_values(values: Tensor, dtype: str) -> Tensor:
    """Returns a frame, uint8, of values whose last dim is a head's."""
    if dtype != SCALED_DTYPE:
        return values.to(FRAME_DTYPES[dtype]).reshape(-1).view(torch.uint8)
    wide = values.float()
    largest = wide.abs().amax(-1, keepdim=True)
    # Not divided by the maximum: torch on a GPU would multiply instead, and round otherwise.
    scales = largest * PER_SCALED
    scales = torch.where(scales > 0, scales, 1.0)
    # Division may round to just above the largest value, which would become NaN.
    scaled = (wide / scales).clamp(-MAX_SCALED, MAX_SCALED).to(FRAME_DTYPES[dtype])
    packed = scaled.reshape(-1).view(torch.uint8)
    num_bytes = count_value_bytes(scales.numel(), values.shape[-1], dtype)
    padding = packed.new_zeros(num_bytes - packed.numel())
    return torch.cat((packed, padding, scales.reshape(-1).view(torch.uint8)))


def decode_values(frame: Tensor, shape: tuple[int, ...], dtype: str) -> Tensor:
    """Returns what `encode_values` was given, rounded; the frame may have any alignment."""
    item_bytes = FRAME_DTYPES[dtype].itemsize
    is_aligned = frame.is_contiguous() and frame.data_ptr() % max(4, item_bytes) == 0
    aligned = frame if is_aligned else frame.clone(memory_format=torch.contiguous_format)
    if dtype != SCALED_DTYPE:
        return aligned.view(FRAME_DTYPES[dtype]).view(shape)
    num_values = math.prod(shape)
    num_rows = num_values // shape[-1]
    values = aligned[:num_values].view(FRAME_DTYPES[dtype]).view(shape)
    scales = aligned[count_value_bytes(num_rows, shape[-1], dtype) :].view(torch.float32)
    return values.float() * scales.view(*shape[:-1], 1)
