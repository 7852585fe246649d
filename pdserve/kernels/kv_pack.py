"""Gathers tokens of scattered KV blocks into a frame, and scatters a frame into blocks.

Letters: L layer, K key or value, B block, S slot, T token, H KV head, D head dim.

A frame holds its values in the order LKTHD, then, of dtype fp8, one scale for each of LKTH. All
kernels run on as few programs as they are told, in loops: beside them, matrix products go on.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.cache.kv_frame import MAX_SCALED, PER_SCALED

CHECKSUM_WORDS = 2
"""int64, modulo 2^32: the sum of a frame's words, and of each times its odd weight 2 i + 1."""
_TILE_WORDS = 4096
_NUM_WARPS = 8
_SIZES = ["offset", "num_tokens", "num_rows", "num_words"]
"""They differ from frame to frame: compiled for none of them, no frame waits for a compiler."""
_TILE_VALUES = 2048


@triton.jit
def _slot_of(token, block_ids_ptr, offset, is_inside, BLOCK_SIZE: tl.constexpr):
    place = token + offset
    block = tl.load(block_ids_ptr + place // BLOCK_SIZE, mask=is_inside, other=0)
    return block.to(tl.int64) * BLOCK_SIZE + place % BLOCK_SIZE


@triton.jit
def _add(cell_ptr, parts):
    tl.atomic_add(cell_ptr, tl.sum(parts, axis=0))


@triton.jit(do_not_specialize=_SIZES)
def copy_rows_kernel(
    blocks_ptr,
    frame_ptr,
    block_ids_ptr,
    checksum_ptr,
    offset,
    num_tokens,
    num_rows,
    row_words,
    stride_l,
    stride_k,
    slot_stride,
    IS_GATHER: tl.constexpr,
    HAS_CHECKSUM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Copies rows of words, one for each (layer, K or V, token); loops over its tiles."""
    words = tl.arange(0, BLOCK_W)[None, :]
    is_word = words < row_words
    total = tl.zeros([BLOCK_R, BLOCK_W], dtype=tl.int32)
    weighted = tl.zeros([BLOCK_R, BLOCK_W], dtype=tl.int32)
    for tile in range(tl.program_id(0), tl.cdiv(num_rows, BLOCK_R), tl.num_programs(0)):
        rows = tile * BLOCK_R + tl.arange(0, BLOCK_R)
        is_row = rows < num_rows
        plane = (rows // num_tokens).to(tl.int64)
        slot = _slot_of(rows % num_tokens, block_ids_ptr, offset, is_row, BLOCK_SIZE)
        in_blocks = (plane // 2) * stride_l + (plane % 2) * stride_k + slot * slot_stride
        in_frame = rows.to(tl.int64) * row_words
        is_inside = is_row[:, None] & is_word
        block_at = blocks_ptr + in_blocks[:, None] + words
        frame_at = frame_ptr + in_frame[:, None] + words
        if IS_GATHER:
            data = tl.load(block_at, mask=is_inside, other=0)
            tl.store(frame_at, data, mask=is_inside)
            if HAS_CHECKSUM:
                index = rows[:, None] * row_words + words
                total += data
                weighted += data * (2 * index + 1)
        else:
            data = tl.load(frame_at, mask=is_inside, other=0)
            tl.store(block_at, data, mask=is_inside)
    if HAS_CHECKSUM:
        _add(checksum_ptr, tl.sum(total.to(tl.int64), axis=1))
        _add(checksum_ptr + 1, tl.sum(weighted.to(tl.int64), axis=1))


@triton.jit(do_not_specialize=_SIZES)
def convert_rows_kernel(
    blocks_ptr,
    frame_ptr,
    scales_ptr,
    block_ids_ptr,
    offset,
    num_tokens,
    num_rows,
    num_heads,
    head_dim,
    stride_l,
    stride_k,
    slot_stride,
    head_stride,
    max_value,
    per_value,
    IS_GATHER: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Copies rows of values, one for each (layer, K or V, token, head), to another dtype."""
    columns = tl.arange(0, BLOCK_D)[None, :]
    is_column = columns < head_dim
    for tile in range(tl.program_id(0), tl.cdiv(num_rows, BLOCK_R), tl.num_programs(0)):
        rows = tile * BLOCK_R + tl.arange(0, BLOCK_R)
        is_row = rows < num_rows
        head = (rows % num_heads).to(tl.int64)
        token = (rows // num_heads) % num_tokens
        plane = (rows // num_heads // num_tokens).to(tl.int64)
        slot = _slot_of(token, block_ids_ptr, offset, is_row, BLOCK_SIZE)
        in_blocks = (plane // 2) * stride_l + (plane % 2) * stride_k
        in_blocks += slot * slot_stride + head * head_stride
        is_inside = is_row[:, None] & is_column
        block_at = blocks_ptr + in_blocks[:, None] + columns
        frame_at = frame_ptr + (rows.to(tl.int64) * head_dim)[:, None] + columns
        if IS_GATHER:
            data = tl.load(block_at, mask=is_inside, other=0).to(tl.float32)
            if HAS_SCALES:
                largest = tl.max(tl.abs(data), axis=1)
                scale = largest * per_value
                scale = tl.where(scale > 0, scale, 1.0)
                tl.store(scales_ptr + rows, scale, mask=is_row)
                # Division may round to just above the largest value, which would become NaN.
                data = tl.clamp(tl.div_rn(data, scale[:, None]), -max_value, max_value)
            tl.store(frame_at, data.to(frame_ptr.dtype.element_ty), mask=is_inside)
        else:
            # fp8 knows no zero to fill with; what is masked is not stored either.
            data = tl.load(frame_at, mask=is_inside).to(tl.float32)
            if HAS_SCALES:
                data *= tl.load(scales_ptr + rows, mask=is_row, other=0)[:, None]
            tl.store(block_at, data.to(blocks_ptr.dtype.element_ty), mask=is_inside)


@triton.jit(do_not_specialize=_SIZES)
def checksum_kernel(frame_ptr, checksum_ptr, num_words, BLOCK_W: tl.constexpr):
    """Adds a frame's words up; loops over its tiles."""
    total = tl.zeros([BLOCK_W], dtype=tl.int32)
    weighted = tl.zeros([BLOCK_W], dtype=tl.int32)
    for tile in range(tl.program_id(0), tl.cdiv(num_words, BLOCK_W), tl.num_programs(0)):
        index = tile * BLOCK_W + tl.arange(0, BLOCK_W)
        data = tl.load(frame_ptr + index, mask=index < num_words, other=0)
        total += data
        weighted += data * (2 * index + 1)
    _add(checksum_ptr, total.to(tl.int64))
    _add(checksum_ptr + 1, weighted.to(tl.int64))


class FramePacker:
    """Packs and scatters frames of the same layers, heads and dtype.

    What does not change from frame to frame is worked out once: a frame's launch is on the path of
    its hand-off.
    """

    def __init__(self, values: Tensor, dtype: torch.dtype, num_programs: int) -> None:
        """Keeps the memory.

        Args:
            values: LKBSHD, a view of the blocks, of the frames' layers and heads only.
            dtype: of the values in frames.
            num_programs: how many run at a time, at most.
        """
        self._values = values
        self._dtype = dtype
        self._num_programs = num_programs
        self._block_size = values.shape[3]
        self._is_copy = dtype == values.dtype and _has_whole_rows(values)
        self._planes = values.shape[0] * 2
        if self._is_copy:
            self._per_word = 4 // values.element_size()
            self._words = _as_words(values)
            self._row_words = values.shape[4] * values.shape[5] // self._per_word
            self._block_w = triton.next_power_of_2(self._row_words)
            self._block_r = max(1, _TILE_WORDS // self._block_w)
        else:
            self._block_d = triton.next_power_of_2(values.shape[5])
            self._block_r = max(1, _TILE_VALUES // self._block_d)

    def gather(
        self, block_ids: Tensor, tokens: range, frame: Tensor, checksum: Tensor | None = None
    ) -> None:
        """Writes a frame.

        Args:
            block_ids: int64, on the device: the blocks that hold the tokens, in order.
            tokens: slots of the tokens, counted from the first block's first.
            frame: uint8, of its size, aligned to 16 bytes.
            checksum: int64 [2], to which the frame's sums are added; None skips it.
        """
        if self._is_copy:
            self._copy(block_ids, tokens, frame, checksum, is_gather=True)
            return
        self._convert(block_ids, tokens, frame, is_gather=True)
        if checksum is not None:
            add_checksum(frame, checksum, num_programs=self._num_programs)

    def scatter(self, block_ids: Tensor, tokens: range, frame: Tensor) -> None:
        """Writes a frame's values to their blocks, of which no two are the same; see `gather`."""
        if self._is_copy:
            self._copy(block_ids, tokens, frame, None, is_gather=False)
        else:
            self._convert(block_ids, tokens, frame, is_gather=False)

    def _copy(
        self,
        block_ids: Tensor,
        tokens: range,
        frame: Tensor,
        checksum: Tensor | None,
        *,
        is_gather: bool,
    ) -> None:
        strides, per_word = self._values.stride(), self._per_word
        num_rows = self._planes * len(tokens)
        words = frame.view(torch.int32)
        assert words.numel() == num_rows * self._row_words
        grid = (min(self._num_programs, triton.cdiv(num_rows, self._block_r)),)
        copy_rows_kernel[grid](
            self._words,
            words,
            block_ids,
            words if checksum is None else checksum,
            tokens.start,
            len(tokens),
            num_rows,
            self._row_words,
            strides[0] // per_word,
            strides[1] // per_word,
            strides[3] // per_word,
            IS_GATHER=is_gather,
            HAS_CHECKSUM=checksum is not None,
            BLOCK_SIZE=self._block_size,
            BLOCK_R=self._block_r,
            BLOCK_W=self._block_w,
            num_warps=_NUM_WARPS,
        )

    def _convert(self, block_ids: Tensor, tokens: range, frame: Tensor, *, is_gather: bool) -> None:
        values, strides = self._values, self._values.stride()
        num_heads, head_dim = values.shape[4:]
        num_rows = self._planes * len(tokens) * num_heads
        has_scales = self._dtype.itemsize == 1
        packed = frame[: num_rows * head_dim * self._dtype.itemsize].view(self._dtype)
        scales = frame[-num_rows * 4 :].view(torch.float32) if has_scales else packed
        grid = (min(self._num_programs, triton.cdiv(num_rows, self._block_r)),)
        convert_rows_kernel[grid](
            values,
            packed,
            scales,
            block_ids,
            tokens.start,
            len(tokens),
            num_rows,
            num_heads,
            head_dim,
            strides[0],
            strides[1],
            strides[3],
            strides[4],
            MAX_SCALED,
            PER_SCALED,
            IS_GATHER=is_gather,
            HAS_SCALES=has_scales,
            BLOCK_SIZE=self._block_size,
            BLOCK_R=self._block_r,
            BLOCK_D=self._block_d,
            num_warps=4,
        )


def add_checksum(frame: Tensor, checksum: Tensor, *, num_programs: int) -> None:
    """Adds a frame's sums to `checksum`, int64 [2]; the order of programs does not matter."""
    words = frame.view(torch.int32)
    num_tiles = triton.cdiv(words.numel(), _TILE_WORDS)
    checksum_kernel[(min(num_programs, num_tiles),)](
        words, checksum, words.numel(), BLOCK_W=_TILE_WORDS, num_warps=_NUM_WARPS
    )


def _has_whole_rows(values: Tensor) -> bool:
    """Says whether a token's heads lie side by side, in whole words."""
    size = values.element_size()
    row_values = values.shape[4] * values.shape[5]
    counts = (row_values, values.stride(3), values.storage_offset())
    return values.stride(4) == values.shape[5] and all(count * size % 4 == 0 for count in counts)


def _as_words(values: Tensor) -> Tensor:
    """Returns memory from a view's first value on as int32; strides are up to the reader."""
    flat = values.as_strided((2 if values.element_size() == 2 else 1,), (1,))
    return flat.view(torch.int32)
