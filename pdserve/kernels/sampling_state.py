"""What rows are sampled with, kept on the device; the host writes a row only when it changes.

A row is eight int64 (64 bytes): temperature, top-p and log(min-p) as float64 bits, the seed, top-k,
sample index, output index, and one unused. Output indices count up on the device.
"""

import math
from collections.abc import Mapping
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from pdserve.sampler import UINT64_MASK, SamplingRow

NUM_FIELDS = 8
SUB_CHUNK = 64
"""Tokens whose greatest logit is kept for the search of filters."""
MAX_CHUNKS = 128
"""Sub-chunks that the quick search looks into."""
MAX_CANDIDATES = 1024
"""Tokens that the quick search ranks; more of them go through the whole vocabulary."""
CHUNK = 2048
"""Tokens of a row that one program reads. Fixed, so that sums do not depend on the batch."""


class RowKind(IntEnum):
    """How much work a row is; a batch takes the kernels of its greatest."""

    GREEDY = 0
    RANDOM = 1
    FILTERED = 2


class DeviceSampling:
    """Parameters of rows, and the room that the sampling kernels work in.

    One thread owns it, the one that launches; writes are ordered with launches on its stream.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        """Allocates; rows are greedy until they are written."""
        self.vocab_size = vocab_size
        self.num_chunks = -(-vocab_size // CHUNK)
        self.num_sub_chunks = -(-vocab_size // SUB_CHUNK)
        self.fields = torch.zeros(max_rows, NUM_FIELDS, dtype=torch.int64, device=device)
        self.fields[:, 1] = _bits(1.0)
        self.fields[:, 2] = _bits(-math.inf)
        shape = (max_rows, self.num_chunks)
        self.chunk_max = torch.empty(shape, dtype=torch.float32, device=device)
        self.chunk_sum = torch.empty(shape, dtype=torch.float32, device=device)
        self.chunk_mass = torch.empty(shape, dtype=torch.float64, device=device)
        self.chunk_choice = torch.empty(shape, dtype=torch.int32, device=device)
        self.arrived = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self.stats = torch.empty(max_rows, 3, dtype=torch.float64, device=device)
        """Greatest logit, log of the sum of exponentials above it, tempered mass."""
        self.sub_max = torch.empty(
            max_rows, self.num_sub_chunks, dtype=torch.float32, device=device
        )
        self.candidates = torch.empty(
            max_rows, MAX_CHUNKS + MAX_CANDIDATES, dtype=torch.int32, device=device
        )
        self.weights = torch.empty(max_rows, MAX_CANDIDATES, dtype=torch.float64, device=device)
        self.is_wide = torch.zeros(max_rows, dtype=torch.int32, device=device)
        """Rows that the quick search left to the search of the whole vocabulary."""
        self._kinds = [RowKind.GREEDY] * max_rows

    def kind_of(self, num_rows: int) -> RowKind:
        """Returns the greatest kind among the first rows."""
        return max(self._kinds[:num_rows], default=RowKind.GREEDY)

    def write(self, rows: Mapping[int, SamplingRow]) -> None:
        """Writes rows by their index; one copy to the device, which nothing waits for."""
        if not rows:
            return
        packed = np.empty((len(rows), NUM_FIELDS + 1), dtype=np.int64)
        for place, (index, row) in enumerate(rows.items()):
            packed[place, 0] = index
            packed[place, 1:] = _pack(row)
            self._kinds[index] = _kind(row, self.vocab_size)
        staged = torch.from_numpy(packed)
        if self.fields.is_cuda:
            staged = staged.pin_memory().to(self.fields.device, non_blocking=True)
        self.fields.index_copy_(0, staged[:, 0], staged[:, 1:])


def _kind(row: SamplingRow, vocab_size: int) -> RowKind:
    params = row.params
    if params.temperature == 0:
        return RowKind.GREEDY
    is_filtered = 0 < params.top_k < vocab_size or params.min_p > 0 or params.top_p < 1
    return RowKind.FILTERED if is_filtered else RowKind.RANDOM


def _pack(row: SamplingRow) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    params = row.params
    log_min_p = math.log(params.min_p) if params.min_p > 0 else -math.inf
    floats = np.array([params.temperature, params.top_p, log_min_p], dtype=np.float64)
    seed = np.array([params.seed & UINT64_MASK], dtype=np.uint64)
    whole = np.array([params.top_k, row.sample_index, row.output_index, 0], dtype=np.int64)
    return np.concatenate([floats.view(np.int64), seed.view(np.int64), whole])


def _bits(value: float) -> int:
    return int(np.array([value], dtype=np.float64).view(np.int64)[0])


def check_device(logits_RV: Tensor, rows: DeviceSampling) -> None:
    """Checks that logits belong to the rows' room; our own mistake if not."""
    assert logits_RV.device == rows.fields.device
    assert logits_RV.shape[1] == rows.vocab_size
    assert logits_RV.shape[0] <= rows.fields.shape[0]
    assert logits_RV.stride(1) == 1
