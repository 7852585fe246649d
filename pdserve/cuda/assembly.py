"""Turns a step plan into what the device is sent, and says where each slice's logits will be."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pdserve.cuda.row_book import RowBook, TableRun
from pdserve.cuda.sampling import SampleSlot
from pdserve.cuda.scoring import PromptTargets
from pdserve.cuda.step_inputs import InputWriter, PromptInputs, StepInputs, slots_of
from pdserve.cuda.step_rows import PromptChunk
from pdserve.cuda.step_shape import ShapeChooser, StepShape
from pdserve.engine.batch import SequenceSlice, StepPlan
from pdserve.kernels.prefill_tuning import LONG_CONTEXT_TOKENS
from pdserve.request import RequestId


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLimits:
    """What a plan must keep to."""

    block_size: int
    num_blocks: int
    vocab_size: int
    max_model_len: int
    keeps_prompts_apart: bool
    """A prompt's token goes through the kernels of prompts even if it comes alone, so that its bits
    do not depend on the chunks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AssembledStep:
    """A step ready to be sent."""

    lane: int
    """Whose tables and sampling state its decoding sequences have."""

    shape: StepShape
    """As captured, or exact."""
    is_captured: bool
    writer: InputWriter
    slots: list[SampleSlot]
    """Rows count those that go through the head; all rows where prompts are scored."""
    targets: tuple[PromptTargets, ...]
    chunks: tuple[PromptChunk, ...]
    """Of the prompts, in the order of their rows."""


class Assembler:
    """Seats sequences and writes their rows. Every plan it takes must be launched, in order."""

    def __init__(
        self,
        inputs: StepInputs,
        chooser: ShapeChooser,
        limits: StepLimits,
        max_seqs: int,
        num_lanes: int = 1,
    ) -> None:
        """Starts with empty seats, in as many lanes as take turns in a pipeline."""
        self._inputs = inputs
        self._chooser = chooser
        self._limits = limits
        self._decode_books = [RowBook(max_seqs) for _ in range(num_lanes)]
        self._lanes = deque(range(num_lanes))
        """The one used longest ago first."""
        self._prompt_book = RowBook(max_seqs)

    def check(self, plan: StepPlan, previous: Mapping[RequestId, int]) -> None:
        """Refuses what cannot be computed; to be called before a plan is assembled.

        Args:
            plan: the step.
            previous: by request, the row that the step before sampled its token in.

        Raises:
            ValueError: a slice is empty, is longer than the model allows, names tokens out of
                range, or awaits a token that the step before did not sample.
        """
        for part in plan.slices:
            self._check(part, previous)

    def assemble(self, plan: StepPlan, previous: Mapping[RequestId, int]) -> AssembledStep:
        """Fills a host buffer.

        Args:
            plan: the step, checked.
            previous: by request, the row that the step before sampled its token in.

        Raises:
            ValueError: a slice names blocks out of range.
        """
        decode, prompts = _split(plan, keeps_prompts_apart=self._limits.keeps_prompts_apart)
        lane = self._choose_lane(decode)
        decode_seats = self._decode_books[lane].seat(decode)
        prompt_seats = self._prompt_book.seat(prompts)
        self._check_runs(decode_seats.runs)
        self._check_runs(prompt_seats.runs)
        by_row = sorted(zip(prompt_seats.rows, prompts, strict=True), key=lambda pair: pair[0])
        prompts = [part for _, part in by_row]
        targets = _targets(prompts, len(decode))
        slots, sample_rows = _sample_slots(
            decode, decode_seats.rows, prompts, scores_prompts=bool(targets)
        )
        exact = StepShape(
            num_decode=len(decode),
            num_prompt_rows=sum(part.num_tokens for part in prompts),
            num_prompts=len(prompts),
            num_samples=None if sample_rows is None else len(sample_rows),
            max_query_tokens=max((part.num_tokens for part in prompts), default=0),
            has_long_context=any(part.start >= LONG_CONTEXT_TOKENS for part in prompts),
        )
        captured = self._chooser.choose(exact)
        shape = exact if captured is None else captured
        writer = self._inputs.next_writer(shape)
        self._write_decode(writer, decode, decode_seats.rows, previous)
        if prompts:
            writer.write_prompts([self._prompt_inputs(part) for part in prompts])
        if sample_rows is not None:
            writer.write_samples(sample_rows)
        writer.update_decode_tables(decode_seats.runs, lane)
        writer.update_prompt_tables(prompt_seats.runs)
        return AssembledStep(
            lane=lane,
            shape=shape,
            is_captured=captured is not None,
            writer=writer,
            slots=slots,
            targets=targets,
            chunks=tuple(
                PromptChunk(num_rows=part.num_tokens, context=part.start) for part in prompts
            ),
        )

    def _choose_lane(self, decode: Sequence[SequenceSlice]) -> int:
        """Returns the lane where the oldest sequence sat in its last step, or one long unused."""
        first = decode[0].request.request_id if decode else None
        seated = (lane for lane in self._lanes if self._decode_books[lane].seats(first))
        lane = next(seated, self._lanes[0])
        self._lanes.remove(lane)
        self._lanes.append(lane)
        return lane

    def _write_decode(
        self,
        writer: InputWriter,
        parts: Sequence[SequenceSlice],
        rows: Sequence[int],
        previous: Mapping[RequestId, int],
    ) -> None:
        size = self._limits.block_size
        if not parts:
            return
        writer.write_decode(
            rows,
            [
                -previous[part.request.request_id] - 1 if part.awaits_token else part.token_ids[0]
                for part in parts
            ],
            [part.start for part in parts],
            [part.block_ids[part.start // size] * size + part.start % size for part in parts],
        )

    def _prompt_inputs(self, part: SequenceSlice) -> PromptInputs:
        return PromptInputs(
            start=part.start,
            token_ids=part.token_ids,
            slots=slots_of(part.block_ids, part.start, part.end, self._limits.block_size),
        )

    def _check(self, part: SequenceSlice, previous: Mapping[RequestId, int]) -> None:
        limits, request_id = self._limits, part.request.request_id
        if not part.num_tokens:
            raise ValueError(f"request {request_id} has an empty slice")
        if part.end > limits.max_model_len:
            raise ValueError(
                f"request {request_id} reaches {part.end} tokens, "
                f"over the limit of {limits.max_model_len}"
            )
        if len(part.block_ids) * limits.block_size < part.end:
            raise ValueError(
                f"request {request_id} needs blocks for {part.end} tokens, "
                f"got {len(part.block_ids)} of {limits.block_size}"
            )
        if len(part.prompt_targets) > len(part.token_ids):
            raise ValueError(f"request {request_id} has more targets than tokens")
        if part.token_ids:
            least, most = min(part.token_ids), max(part.token_ids)
            if least < 0 or most >= limits.vocab_size:
                wrong = least if least < 0 else most
                raise ValueError(
                    f"request {request_id}: token id must be in [0, {limits.vocab_size}), "
                    f"got {wrong}"
                )
        if part.awaits_token and (part.token_ids or request_id not in previous):
            raise ValueError(f"request {request_id} awaits a token that no step samples")

    def _check_runs(self, runs: Sequence[TableRun]) -> None:
        """Blocks are checked where they are new: all others were."""
        num_blocks = self._limits.num_blocks
        for run in runs:
            if min(run.block_ids) < 0 or max(run.block_ids) >= num_blocks:
                raise ValueError(f"block ids must be in [0, {num_blocks}), got {run.block_ids}")


def _split(
    plan: StepPlan, *, keeps_prompts_apart: bool
) -> tuple[list[SequenceSlice], list[SequenceSlice]]:
    """Tells slices of one token from the others; one whose token is scored is among the others."""
    decode: list[SequenceSlice] = []
    prompts: list[SequenceSlice] = []
    for part in plan.slices:
        is_decode = part.num_tokens == 1 and not part.prompt_targets
        if keeps_prompts_apart and part.start < part.request.num_prompt_tokens:
            is_decode = False
        (decode if is_decode else prompts).append(part)
    return decode, prompts


def _targets(prompts: Sequence[SequenceSlice], first_row: int) -> tuple[PromptTargets, ...]:
    found: list[PromptTargets] = []
    for part in prompts:
        if part.prompt_targets:
            found.append(
                PromptTargets(
                    request_id=part.request.request_id,
                    first_row=first_row,
                    token_ids=part.prompt_targets,
                    num_top=part.request.sampling.prompt_logprobs or 0,
                )
            )
        first_row += part.num_tokens
    return tuple(found)


def _sample_slots(
    decode: Sequence[SequenceSlice],
    decode_rows: Sequence[int],
    prompts: Sequence[SequenceSlice],
    *,
    scores_prompts: bool,
) -> tuple[list[SampleSlot], list[int] | None]:
    """Returns the slices that sample, and the rows that go through the head; None for all."""
    if not prompts:
        slots = [
            SampleSlot(part=part, row=row)
            for part, row in zip(decode, decode_rows, strict=True)
            if part.output_index is not None
        ]
        return slots, None
    rows: list[int] = []
    slots = []
    row_of = list(zip(decode, decode_rows, strict=True))
    end = len(decode)
    for part in prompts:
        end += part.num_tokens
        row_of.append((part, end - 1))
    for part, row in row_of:
        if part.output_index is not None:
            slots.append(SampleSlot(part=part, row=row if scores_prompts else len(rows)))
            rows.append(row)
    return slots, None if scores_prompts else rows
