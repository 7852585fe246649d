"""The sizes of a step's tensors, and which of them graphs are captured for. Pure."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

PROMPT_BUCKETS = (64, 128, 256, 512)
"""Rows of graphs for prompts. Behind 512 rows the device is slower than the launches."""
ROWS_PER_RANK = 1024
ROWS_APART = 256
"""Of tensor ranks, each of which computes a share of a row and launches as much: their graphs go on
to so many rows a rank, this far apart. A step is as slow as the slowest of all ranks' hosts."""
GRAPH_PROMPTS = 8
"""Most sequences in them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepShape:
    """Sizes of a step, padding included. Steps of one shape are one graph."""

    num_decode: int
    """Rows of sequences that compute one token."""
    num_prompt_rows: int
    num_prompts: int
    """Sequences that compute several tokens."""
    num_samples: int | None
    """Rows that go through the head; None: all."""
    max_query_tokens: int
    """Of one prompt."""
    has_long_context: bool = False
    """Whether a prompt has many cached tokens before it: few rows are then cut up along them."""

    @property
    def num_rows(self) -> int:
        """All rows."""
        return self.num_decode + self.num_prompt_rows


def decode_shape(num_rows: int) -> StepShape:
    """Returns the shape of a step that decodes only."""
    return StepShape(
        num_decode=num_rows,
        num_prompt_rows=0,
        num_prompts=0,
        num_samples=None,
        max_query_tokens=0,
    )


def prompt_shape(num_rows: int, num_prompts: int, *, has_long_context: bool = False) -> StepShape:
    """Returns the shape of a step of prompts that all sample, however they share the rows."""
    return StepShape(
        num_decode=0,
        num_prompt_rows=num_rows,
        num_prompts=num_prompts,
        num_samples=num_prompts,
        max_query_tokens=num_rows,
        has_long_context=has_long_context,
    )


def decode_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Returns the batch sizes of decode graphs: fine steps where the weights are all the cost."""
    wanted = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, max_num_seqs + 1, 32)]
    return (*(size for size in wanted if size < max_num_seqs), max_num_seqs)


def prompt_buckets(tensor_parallel: int) -> tuple[int, ...]:
    """Returns the rows of graphs for prompts."""
    if tensor_parallel == 1:
        return PROMPT_BUCKETS
    longest = ROWS_PER_RANK * tensor_parallel
    return (*PROMPT_BUCKETS, *range(PROMPT_BUCKETS[-1] + ROWS_APART, longest + 1, ROWS_APART))


def graph_shapes(
    max_num_seqs: int, max_num_batched_tokens: int, tensor_parallel: int = 1
) -> tuple[StepShape, ...]:
    """Returns every shape to capture, the largest first: the others fit in its memory."""
    num_prompts = min(GRAPH_PROMPTS, max_num_seqs)
    buckets = prompt_buckets(tensor_parallel)
    rows_wanted = (rows for rows in buckets if rows <= max_num_batched_tokens)
    prompts = [
        prompt_shape(rows, num_prompts, has_long_context=is_long)
        for rows in rows_wanted
        for is_long in (False, True)
    ]
    shapes = [*prompts, *(decode_shape(rows) for rows in decode_buckets(max_num_seqs))]
    return tuple(sorted(shapes, key=lambda shape: -shape.num_rows))


class ShapeChooser:
    """Finds the captured shape that holds a step."""

    def __init__(self, captured: Sequence[StepShape]) -> None:
        """Takes what `graph_shapes` made, or nothing."""
        self._decode = sorted(shape.num_decode for shape in captured if shape.num_decode)
        self._prompt = sorted(
            (shape for shape in captured if shape.num_prompts),
            key=lambda shape: shape.num_prompt_rows,
        )

    def choose(self, exact: StepShape) -> StepShape | None:
        """Returns the smallest captured shape around an exact one; None: compute it as it is."""
        if exact.num_prompts == 0:
            index = bisect_left(self._decode, exact.num_decode)
            return decode_shape(self._decode[index]) if index < len(self._decode) else None
        if exact.num_decode or exact.num_samples is None:
            return None
        for shape in self._prompt:
            holds_rows = exact.num_prompt_rows <= shape.num_prompt_rows
            is_alike = exact.has_long_context == shape.has_long_context
            if holds_rows and is_alike and exact.num_prompts <= shape.num_prompts:
                return shape
        return None
