"""What the host sends for a step: one buffer, one copy, always to the same place on the device.

    header | sources M | positions M | slots M | lengths D | query starts P + 1 | contexts P |
    sample rows R | table updates

`sources` are token ids, or rows of the step before whose sampled token the host does not know yet.
Block tables stay on the device; a step brings what is new in them.

Letters: M rows, D decode rows, P prompts, R rows that sample, W blocks in a table.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.cuda.device import Device
from pdserve.cuda.row_book import TableRun
from pdserve.cuda.step_rows import DecodeRows, PromptChunk, PromptRows, StepRows
from pdserve.cuda.step_shape import StepShape
from pdserve.kernels.step_inputs import take_step_inputs

ALIGNMENT = 4
"""Values; a part starts on 16 bytes, whatever the sizes before it: kernels are made for that."""
HEADER = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Where each part of the buffer begins."""

    sources: int
    positions: int
    slots: int
    lengths: int
    query_starts: int
    contexts: int
    sample_rows: int
    updates: int


def layout_of(shape: StepShape) -> Layout:
    """Lays a shape out."""
    sizes = (
        shape.num_rows,
        shape.num_rows,
        shape.num_rows,
        shape.num_decode,
        shape.num_prompts + 1,
        shape.num_prompts,
        shape.num_samples or 0,
    )
    padded = (-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)
    starts = list(accumulate(padded, initial=0))
    return Layout(
        sources=starts[0],
        positions=starts[1],
        slots=starts[2],
        lengths=starts[3],
        query_starts=starts[4],
        contexts=starts[5],
        sample_rows=starts[6],
        updates=starts[7],
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class InputLimits:
    """The largest step."""

    max_rows: int
    max_seqs: int
    """Decode rows at a time; and prompts at a time."""
    max_samples: int
    max_blocks: int
    """Of one sequence."""


class StepInputs:
    """The buffers on both sides. Host buffers take turns: several steps may be in flight."""

    def __init__(
        self, limits: InputLimits, device: Device, *, num_lanes: int = 1, max_in_flight: int = 2
    ) -> None:
        """Allocates.

        Args:
            limits: of one step.
            device: that computes.
            num_lanes: sets of decoding sequences that take turns. Each has tables of its own,
                which are copied to where graphs look for them; one alone has them there.
            max_in_flight: steps that may be launched and not have ended.
        """
        self._limits = limits
        self._device = device
        rows, seqs = limits.max_rows, limits.max_seqs
        fixed = 3 * rows + 2 * seqs + seqs + 1 + limits.max_samples + 8 * ALIGNMENT
        # A table may have to be written whole, of every sequence.
        size = fixed + HEADER + 2 * (1 + min(2, num_lanes)) * seqs * limits.max_blocks
        self._device_buffer = device.zeros((size,), torch.int32)
        # One is filled while the others fly.
        self._host_buffers = [device.pinned((size,), torch.int32) for _ in range(max_in_flight + 1)]
        self._turn = 0
        self._token_ids = device.zeros((rows,), torch.int32)
        # Rows of decoding sequences, then those of prompts; then, of several lanes, each one's.
        self._num_lanes = num_lanes
        num_rows = (2 if num_lanes == 1 else 2 + num_lanes) * seqs
        self._tables = device.zeros((num_rows, limits.max_blocks), torch.int32)

    @property
    def num_bytes(self) -> int:
        """What lies on the device."""
        return self._device_buffer.nbytes + self._token_ids.nbytes + self._tables.nbytes

    def next_writer(self, shape: StepShape) -> "InputWriter":
        """Returns the host's buffer for a new step, its padding filled in."""
        self._turn = (self._turn + 1) % len(self._host_buffers)
        buffer = self._host_buffers[self._turn]
        return InputWriter(buffer, shape, self._limits, has_lanes=self._num_lanes > 1)

    def send(self, writer: "InputWriter", lane: int = 0) -> None:
        """Copies a step's inputs to the device, behind all work so far."""
        size = writer.finish()
        self._device_buffer[:size].copy_(writer.buffer[:size], non_blocking=True)
        num_rows = writer.shape.num_decode
        if self._num_lanes > 1 and num_rows:
            start = (2 + lane) * self._limits.max_seqs
            self._tables[:num_rows].copy_(self._tables[start : start + num_rows], non_blocking=True)

    def take(
        self,
        shape: StepShape,
        previous_ids: Tensor,
        chunks: tuple[PromptChunk, ...] | None = None,
    ) -> StepRows:
        """Launches what makes a step's rows of what was sent, and returns them."""
        layout, buffer = layout_of(shape), self._device_buffer
        rows, seqs = shape.num_rows, self._limits.max_seqs
        token_ids = self._token_ids[:rows]
        take_step_inputs(
            buffer[layout.sources : layout.sources + rows],
            previous_ids,
            token_ids,
            buffer[layout.updates :],
            self._tables,
        )
        decode, prompt, samples = None, None, None
        if shape.num_decode:
            decode = DecodeRows(
                block_tables_BW=self._tables[: shape.num_decode],
                lengths_B=buffer[layout.lengths : layout.lengths + shape.num_decode],
            )
        if shape.num_prompts:
            count = shape.num_prompts
            prompt = PromptRows(
                first_row=shape.num_decode,
                num_rows=shape.num_prompt_rows,
                block_tables_BW=self._tables[seqs : seqs + count],
                query_starts=buffer[layout.query_starts : layout.query_starts + count + 1],
                context_lengths_B=buffer[layout.contexts : layout.contexts + count],
                max_query_tokens=shape.max_query_tokens,
                has_long_context=shape.has_long_context,
                chunks=chunks,
            )
        if shape.num_samples is not None:
            samples = buffer[layout.sample_rows : layout.sample_rows + shape.num_samples]
        return StepRows(
            token_ids_M=token_ids,
            positions_M=buffer[layout.positions : layout.positions + rows],
            slots_M=buffer[layout.slots : layout.slots + rows],
            decode=decode,
            prompt=prompt,
            sample_rows_R=samples,
        )


class InputWriter:
    """Fills one host buffer for one step."""

    def __init__(
        self, buffer: Tensor, shape: StepShape, limits: InputLimits, *, has_lanes: bool = False
    ) -> None:
        """Fills in padding: no token, no slot, no length."""
        self.buffer = buffer
        self.shape = shape
        self._has_lanes = has_lanes
        self._array: NDArray[np.int32] = buffer.numpy()
        self._layout = layout_of(shape)
        self._limits = limits
        self._num_updates = 0
        array, layout = self._array, self._layout
        array[: layout.updates] = 0
        array[layout.slots : layout.slots + shape.num_rows] = -1

    def write_decode(
        self,
        rows: Sequence[int],
        sources: Sequence[int],
        positions: Sequence[int],
        slots: Sequence[int],
    ) -> None:
        """Writes rows of one token each."""
        array, layout = self._array, self._layout
        at = np.asarray(rows, dtype=np.int64)
        places = np.asarray(positions, dtype=np.int32)
        array[layout.sources + at] = sources
        array[layout.positions + at] = places
        array[layout.slots + at] = slots
        array[layout.lengths + at] = places + 1

    def write_prompts(self, prompts: Sequence["PromptInputs"]) -> None:
        """Writes the rows of prompts, in the order of their table rows."""
        array, layout = self._array, self._layout
        starts = list(accumulate((len(one.token_ids) for one in prompts), initial=0))
        first_row = self.shape.num_decode
        for one, start in zip(prompts, starts[:-1], strict=True):
            count, row = len(one.token_ids), first_row + start
            array[layout.sources + row : layout.sources + row + count] = one.token_ids
            array[layout.positions + row : layout.positions + row + count] = np.arange(
                one.start, one.start + count, dtype=np.int32
            )
            array[layout.slots + row : layout.slots + row + count] = one.slots
        starts += [starts[-1]] * (self.shape.num_prompts + 1 - len(starts))
        array[layout.query_starts : layout.query_starts + len(starts)] = starts
        contexts = [one.start for one in prompts]
        array[layout.contexts : layout.contexts + len(contexts)] = contexts

    def write_samples(self, rows: Sequence[int]) -> None:
        """Writes which rows go through the head."""
        start = self._layout.sample_rows
        self._array[start : start + len(rows)] = rows

    def update_decode_tables(self, runs: Sequence[TableRun], lane: int = 0) -> None:
        """Writes what is new in the block tables of decoding sequences."""
        self._update_tables(runs, 0)
        if self._has_lanes:
            self._update_tables(runs, (2 + lane) * self._limits.max_seqs)

    def update_prompt_tables(self, runs: Sequence[TableRun]) -> None:
        """Writes what is new in the block tables of prompts."""
        self._update_tables(runs, self._limits.max_seqs)

    def _update_tables(self, runs: Sequence[TableRun], base: int) -> None:
        width, array = self._limits.max_blocks, self._array
        at = self._layout.updates + HEADER + 2 * self._num_updates
        for run in runs:
            count = len(run.block_ids)
            place = (base + run.row) * width + run.first
            if count == 1:  # by far the most frequent: a sequence's next block
                array[at], array[at + 1] = place, run.block_ids[0]
            else:
                array[at : at + 2 * count : 2] = np.arange(place, place + count)
                array[at + 1 : at + 2 * count : 2] = run.block_ids
            at += 2 * count
            self._num_updates += count

    def finish(self) -> int:
        """Ends the buffer; returns how many values to send."""
        start = self._layout.updates
        self._array[start : start + HEADER] = (self._num_updates, 0, 0, 0)
        return start + HEADER + 2 * self._num_updates


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptInputs:
    """The rows of one prompt."""

    start: int
    """Position of the first."""
    token_ids: Sequence[int]
    slots: NDArray[np.int32]


def slots_of(block_ids: Sequence[int], start: int, end: int, block_size: int) -> NDArray[np.int32]:
    """Returns the slots of a sequence's tokens [start, end)."""
    first = start // block_size
    blocks = np.asarray(block_ids[first : -(-end // block_size)], dtype=np.int32)
    slots = np.empty((len(blocks), block_size), dtype=np.int32)
    slots[:] = blocks[:, None] * block_size
    slots += np.arange(block_size, dtype=np.int32)
    offset = start - first * block_size
    return slots.reshape(-1)[offset : offset + end - start]
