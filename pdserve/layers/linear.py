"""Matrix products whose result for a row does not depend on the other rows.

Letters: M rows (tokens), K inputs, N outputs.

In float32 the oneDNN products over packed weights come out bit-equal for a row whatever M is, but
that is a property of a CPU and a library version, so `choose_backend` tries it on the shapes of
the model before any weight is packed, and takes the smallest number of rows (padding up to it)
from which on it holds.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from pdserve.errors import ConfigError

logger = logging.getLogger(__name__)

MIN_ROWS_CANDIDATES = (1, 2, 4, 8, 16, 32)
PROBE_ROWS = 257
HEAD_PROBE_ROWS = 64
"""For weights as large as a head, which only sees the rows that sample."""
LARGE_WEIGHT_VALUES = 1 << 23
PROBE_SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64)
"""Row counts tried at start: around the register tiles of AVX2, AVX-512 and AMX kernels."""
DRAWN_ROWS = 256
"""Probe weights repeat after this many rows: drawing a whole head takes most of a second."""
PACKING_ROWS_HINT = 64
"""Rows that the packed layout is chosen for."""
WIDENED_VALUES = 1 << 19
"""float32 values of a weight made at a time: 2 MiB, to stay near the second-level cache."""
WIDENING_MIN_ROWS = 3
"""For fewer rows torch reads bfloat16 once at memory speed; from here on it computes it slowly."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearBackend:
    """How products are computed; chosen once when a model is loaded."""

    is_packed: bool
    """Through oneDNN with packed weights, else torch's own product."""
    min_rows: int = 1
    """Fewer rows are padded up to this."""
    scratch: Tensor | None = field(default=None, compare=False, repr=False)
    """float32 room for a part of a weight, shared by all products of a model; where it is given,
    weights are widened part by part: on a CPU without bfloat16 a product of 512 rows takes 1/7 of
    torch's own time, one of 8 rows half of it (AVX2, SmolLM2's shapes)."""


class Linear:
    """y = x W^T + b with a W that is packed where the CPU can."""

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None, backend: LinearBackend) -> None:
        """Packs the weight; the original may be dropped afterwards."""
        self._num_outputs = weight_NK.shape[0]
        self._backend = backend
        self._bias_N = bias_N
        self._weight = pack_weight(weight_NK) if backend.is_packed else weight_NK.contiguous()

    def __call__(self, x_MK: Tensor) -> Tensor:
        """Returns [M, N]."""
        num_rows = x_MK.shape[0]
        missing = self._backend.min_rows - num_rows
        if missing > 0:
            x_MK = functional.pad(x_MK, (0, 0, 0, missing))
        scratch = self._backend.scratch
        if scratch is not None and num_rows >= WIDENING_MIN_ROWS:
            y_MN = widened_product(x_MK, self._weight, self._bias_N, scratch)
        elif self._backend.is_packed:
            y_MN = packed_product(x_MK, self._weight, self._bias_N)
        else:
            y_MN = functional.linear(x_MK, self._weight, self._bias_N)
        return y_MN[:num_rows] if missing > 0 else y_MN


def pack_weight(weight_NK: Tensor) -> Tensor:
    """Reorders a weight into oneDNN's own layout (a private operator of torch)."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(
        weight_NK.contiguous(), PACKING_ROWS_HINT
    )
    return packed


def packed_product(x_MK: Tensor, packed: Tensor, bias_N: Tensor | None) -> Tensor:
    """Multiplies by a packed weight."""
    y_MN: Tensor = torch.ops.mkldnn._linear_pointwise(x_MK, packed, bias_N, "none", [], "")
    return y_MN


def widened_product(
    x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, scratch: Tensor
) -> Tensor:
    """Multiplies by a narrow weight in float32 and rounds once.

    Args:
        x_MK: activations, in the weight's dtype.
        weight_NK: contiguous.
        bias_N: in the weight's dtype.
        scratch: float32, at least K values.
    """
    num_outputs, num_inputs = weight_NK.shape
    step = min(num_outputs, scratch.numel() // num_inputs)
    wide_MK = x_MK.float()
    y_MN = x_MK.new_empty(x_MK.shape[0], num_outputs)
    for start in range(0, num_outputs, step):
        part_NK = weight_NK[start : start + step]
        wide_NK = scratch[: part_NK.numel()].view(part_NK.shape).copy_(part_NK)
        y_MN[:, start : start + step] = functional.linear(wide_MK, wide_NK)
    return y_MN if bias_N is None else y_MN.add_(bias_N)


def self_test(linear: Linear, num_rows: int, num_inputs: int, dtype: torch.dtype) -> bool:
    """Says whether rows come out as in a product of `num_rows`, bit by bit, for fewer rows."""
    generator = torch.Generator().manual_seed(0)
    x_MK = torch.randn(num_rows, num_inputs, generator=generator).to(dtype)
    expected_MN = linear(x_MK)
    return all(torch.equal(linear(x_MK[:rows]), expected_MN[:rows]) for rows in PROBE_SIZES)


def choose_backend(dtype: torch.dtype, shapes: Iterable[tuple[int, int]]) -> LinearBackend:
    """Chooses how the products of a model are computed on this machine.

    Args:
        dtype: of weights and activations.
        shapes: (N, K) of every product.

    Raises:
        ConfigError: dtype is float32 and no way of computing is independent of the batch.
    """
    distinct = sorted(set(shapes))
    can_pack = _can_pack(dtype)
    if dtype != torch.float32:
        scratch = None
        if not can_pack:
            widest = max(num_inputs for _, num_inputs in distinct)
            scratch = torch.empty(max(WIDENED_VALUES, widest))
        logger.info("linear backend chosen", extra={"packed": can_pack, "min_rows": 1})
        return LinearBackend(is_packed=can_pack, scratch=scratch)
    for is_packed in (True, False) if can_pack else (False,):
        for min_rows in MIN_ROWS_CANDIDATES:
            backend = LinearBackend(is_packed=is_packed, min_rows=min_rows)
            if all(_holds_for_shape(shape, dtype, backend) for shape in distinct):
                extra = {"packed": is_packed, "min_rows": min_rows}
                logger.info("linear backend chosen", extra=extra)
                return backend
    raise ConfigError(
        "float32 products on this CPU depend on the batch size, so equal output cannot be "
        "promised; use dtype bfloat16",
        settings=("dtype",),
    )


def check_cuts(
    dtype: torch.dtype, cuts: Iterable[tuple[int, int, int]], backend: LinearBackend
) -> None:
    """Checks that some outputs of a product come out as in the product of all, bit by bit.

    Args:
        dtype: of weights and activations.
        cuts: (all outputs, outputs on this rank, inputs) of every product.
        backend: how they are computed.

    Raises:
        ConfigError: they do not, so that more ranks would compute other tokens.
    """
    generator = torch.Generator().manual_seed(2)
    for num_whole, num_cut, num_inputs in sorted(set(cuts)):
        num_whole = min(num_whole, max(LARGE_WEIGHT_VALUES // num_inputs, num_cut))
        weight_NK = torch.randn(num_whole, num_inputs, generator=generator).to(dtype)
        x_MK = torch.randn(HEAD_PROBE_ROWS, num_inputs, generator=generator).to(dtype)
        whole, cut = (Linear(weight_NK[:n], None, backend) for n in (num_whole, num_cut))
        for num_rows in (1, 2, 17, HEAD_PROBE_ROWS):
            if not torch.equal(cut(x_MK[:num_rows]), whole(x_MK[:num_rows])[:, :num_cut]):
                raise ConfigError(
                    f"tensor_parallel: float32 products on this CPU depend on how many outputs "
                    f"they have ({num_cut} of {num_whole}), so equal output cannot be promised; "
                    "use tensor_parallel 1 or dtype bfloat16",
                    settings=("tensor_parallel", "dtype"),
                )


def _can_pack(dtype: torch.dtype) -> bool:
    weight_NK = torch.ones(16, 16, dtype=dtype)
    try:
        packed_product(weight_NK, pack_weight(weight_NK), None)
    except (RuntimeError, AttributeError):  # no oneDNN, or no such type on this CPU
        return False
    return True


def _holds_for_shape(shape: tuple[int, int], dtype: torch.dtype, backend: LinearBackend) -> bool:
    num_outputs, num_inputs = shape
    is_large = num_outputs * num_inputs > LARGE_WEIGHT_VALUES
    # Outputs are computed in blocks: a head of 49,152 shows no more than a third of it does, and
    # packing all of it took 0.3 s of every start.
    num_outputs = min(num_outputs, LARGE_WEIGHT_VALUES // num_inputs)
    generator = torch.Generator().manual_seed(1)
    some_rows = torch.randn(min(num_outputs, DRAWN_ROWS), num_inputs, generator=generator)
    weight_NK = some_rows.repeat(-(-num_outputs // DRAWN_ROWS), 1)[:num_outputs]
    num_rows = HEAD_PROBE_ROWS if is_large else PROBE_ROWS
    return self_test(Linear(weight_NK.to(dtype), None, backend), num_rows, num_inputs, dtype)
