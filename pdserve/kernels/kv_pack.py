"""Gathers tokens of scattered KV blocks into a frame, and scatters a frame into blocks.

Letters: L layer, K key or value, B block, S slot, T token, H KV head, D head dim.

A frame holds its values in the order LKTHD, then, of dtype fp8, one scale for each of LKTH. All
kernels run on as few programs as they are told, in loops: beside them, matrix products go on.

A frame's checksum is two sums modulo 2^32: of its words, and of each times its odd weight 2 i + 1.
Each program stores its share; the host adds them up.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.cache.kv_frame import MAX_SCALED, PER_SCALED
from pdserve.kernels.fixed_launch import FixedLaunch

SUM_WORDS = 2
"""int64, of each program."""
_TILE_WORDS = 4096
_NUM_WARPS = 8
_SIZES = ["offset", "num_tokens", "num_rows", "num_words"]
"""They differ from frame to frame: compiled for none of them, no frame waits for a compiler."""
_POINTERS = ["block_ids_ptr", "sums_ptr", "scales_ptr"]
"""Of any alignment."""
_TILE_VALUES = 2048
_NUM_CONVERTING_WARPS = 4


@triton.jit
def _slot_of(token, block_ids_ptr, offset, is_inside, BLOCK_SIZE: tl.constexpr):
    place = token + offset
    block = tl.load(block_ids_ptr + place // BLOCK_SIZE, mask=is_inside, other=0)
    return block.to(tl.int64) * BLOCK_SIZE + place % BLOCK_SIZE


@triton.jit
def _store_sums(sums_ptr, plain, weighted):
    row = sums_ptr + 2 * tl.program_id(0)
    tl.store(row, tl.sum(plain.to(tl.int64), axis=0))
    tl.store(row + 1, tl.sum(weighted.to(tl.int64), axis=0))


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_POINTERS)
def copy_rows_kernel(
    blocks_ptr,
    frame_ptr,
    block_ids_ptr,
    sums_ptr,
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
        else:
            data = tl.load(frame_at, mask=is_inside, other=0)
            tl.store(block_at, data, mask=is_inside)
        if HAS_CHECKSUM:
            index = rows[:, None] * row_words + words
            total += data
            weighted += data * (2 * index + 1)
    if HAS_CHECKSUM:
        plain = tl.sum(total.to(tl.int64), axis=1)
        _store_sums(sums_ptr, plain, tl.sum(weighted.to(tl.int64), axis=1))


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_POINTERS)
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


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_POINTERS)
def checksum_kernel(frame_ptr, sums_ptr, num_words, BLOCK_W: tl.constexpr):
    """Adds a frame's words up; loops over its tiles."""
    total = tl.zeros([BLOCK_W], dtype=tl.int32)
    weighted = tl.zeros([BLOCK_W], dtype=tl.int32)
    for tile in range(tl.program_id(0), tl.cdiv(num_words, BLOCK_W), tl.num_programs(0)):
        index = tile * BLOCK_W + tl.arange(0, BLOCK_W)
        data = tl.load(frame_ptr + index, mask=index < num_words, other=0)
        total += data
        weighted += data * (2 * index + 1)
    _store_sums(sums_ptr, total, weighted)


class FramePacker:
    """Packs and scatters frames of the same layers, heads and dtype.

    What does not change from frame to frame is worked out once: a frame's launch is on the path of
    its hand-off. Any thread.
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
        self._planes = values.shape[0] * 2
        self._is_copy = dtype == values.dtype and _has_whole_rows(values)
        self._summing = FrameAdder(num_programs)
        if self._is_copy:
            self._prepare_copying()
        else:
            self._prepare_converting()

    def gather(
        self, block_ids: Tensor, tokens: range, frame: Tensor, sums: Tensor | None, stream: int
    ) -> int:
        """Launches the writing of a frame.

        Args:
            block_ids: int64, on the device: the blocks that hold the tokens, in order.
            tokens: slots of the tokens, counted from the first block's first.
            frame: uint8, of its size, aligned to 16 bytes.
            sums: int64 [num_programs, 2], on the device or pinned; None: no checksum.
            stream: handle of the stream.

        Returns:
            How many rows of `sums` are written.
        """
        return self._move(block_ids, tokens, frame, sums, stream, is_gather=True)

    def scatter(
        self, block_ids: Tensor, tokens: range, frame: Tensor, sums: Tensor | None, stream: int
    ) -> int:
        """Launches the writing of a frame's values to their blocks, all different; see `gather`."""
        return self._move(block_ids, tokens, frame, sums, stream, is_gather=False)

    def _move(
        self,
        block_ids: Tensor,
        tokens: range,
        frame: Tensor,
        sums: Tensor | None,
        stream: int,
        *,
        is_gather: bool,
    ) -> int:
        launch = self._launches[is_gather, sums is not None and self._is_copy]
        if self._is_copy:
            return self._copy(launch, block_ids, tokens, frame, sums, stream)
        self._convert(launch, block_ids, tokens, frame, stream)
        return 0 if sums is None else self._summing.add_up(frame, sums, stream)

    def _prepare_copying(self) -> None:
        values = self._values
        per_word = 4 // values.element_size()
        self._words = _as_words(values)
        self._row_words = values.shape[4] * values.shape[5] // per_word
        self._word_strides = [values.stride(axis) // per_word for axis in (0, 1, 3)]
        block_w = triton.next_power_of_2(self._row_words)
        self._block_r = max(1, _TILE_WORDS // block_w)

        def launch_of(*, is_gather: bool, has_checksum: bool) -> FixedLaunch:
            constants = {
                "IS_GATHER": is_gather,
                "HAS_CHECKSUM": has_checksum,
                "BLOCK_SIZE": values.shape[3],
                "BLOCK_R": self._block_r,
                "BLOCK_W": block_w,
            }
            return FixedLaunch(copy_rows_kernel, constants, _NUM_WARPS)

        self._launches = {
            (is_gather, has_checksum): launch_of(is_gather=is_gather, has_checksum=has_checksum)
            for is_gather in (True, False)
            for has_checksum in (True, False)
        }

    def _prepare_converting(self) -> None:
        values = self._values
        block_d = triton.next_power_of_2(values.shape[5])
        self._block_r = max(1, _TILE_VALUES // block_d)
        self._strides = [values.stride(axis) for axis in (0, 1, 3, 4)]

        def launch_of(*, is_gather: bool) -> FixedLaunch:
            constants = {
                "IS_GATHER": is_gather,
                "HAS_SCALES": self._dtype.itemsize == 1,
                "BLOCK_SIZE": values.shape[3],
                "BLOCK_R": self._block_r,
                "BLOCK_D": block_d,
            }
            return FixedLaunch(convert_rows_kernel, constants, _NUM_CONVERTING_WARPS)

        self._launches = {(one, False): launch_of(is_gather=one) for one in (True, False)}

    def _copy(
        self,
        launch: FixedLaunch,
        block_ids: Tensor,
        tokens: range,
        frame: Tensor,
        sums: Tensor | None,
        stream: int,
    ) -> int:
        num_rows = self._planes * len(tokens)
        assert frame.numel() == num_rows * self._row_words * 4
        num_programs: int = min(self._num_programs, -(-num_rows // self._block_r))
        launch(
            num_programs,
            stream,
            self._words,
            frame.view(torch.int32),
            block_ids,
            block_ids if sums is None else sums,
            tokens.start,
            len(tokens),
            num_rows,
            self._row_words,
            *self._word_strides,
        )
        return num_programs

    def _convert(
        self, launch: FixedLaunch, block_ids: Tensor, tokens: range, frame: Tensor, stream: int
    ) -> None:
        num_heads, head_dim = self._values.shape[4:]
        num_rows = self._planes * len(tokens) * num_heads
        packed = frame[: num_rows * head_dim * self._dtype.itemsize].view(self._dtype)
        has_scales = self._dtype.itemsize == 1
        launch(
            min(self._num_programs, -(-num_rows // self._block_r)),
            stream,
            self._values,
            packed,
            frame[-num_rows * 4 :].view(torch.float32) if has_scales else packed,
            block_ids,
            tokens.start,
            len(tokens),
            num_rows,
            num_heads,
            head_dim,
            *self._strides,
            MAX_SCALED,
            PER_SCALED,
        )


class FrameAdder:
    """Adds frames up. Any thread."""

    def __init__(self, num_programs: int) -> None:
        """Keeps how many programs run at most."""
        self.num_programs = num_programs
        constants = {"BLOCK_W": _TILE_WORDS}
        self._launch = FixedLaunch(checksum_kernel, constants, _NUM_WARPS)

    def add_up(self, frame: Tensor, sums: Tensor, stream: int) -> int:
        """Launches the adding up of a frame, aligned to 16 bytes; see `FramePacker.gather`."""
        words = frame.view(torch.int32)
        num_words = int(words.numel())
        num_programs: int = min(self.num_programs, -(-num_words // _TILE_WORDS))
        self._launch(num_programs, stream, words, sums, num_words)
        return num_programs


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
