"""Launches steps on a device and collects their tokens: the `StepRunner` of a GPU.

    launch: rows and tables -> one copy -> graph, or kernels one by one -> sampling -> ids to host
    result: waits for that last copy alone, while the step behind is computed

Tokens that the host does not know yet are taken, on the device, from what an earlier step sampled.
In a pipeline every stage has such a runner (see `stages`); the last one samples, and its host tells
rank 0 what.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.cache.kv_tensors import KvTensors
from pdserve.cuda.assembly import AssembledStep, Assembler, StepLimits
from pdserve.cuda.awaited import AwaitedIds
from pdserve.cuda.device import Device, StepEvent
from pdserve.cuda.graphs import CaptureReport, GraphSet
from pdserve.cuda.marks import LayerMarks
from pdserve.cuda.model import CudaModel, NoteStored
from pdserve.cuda.sampling import ChosenTokens, SampleSlot, TokenChooser
from pdserve.cuda.scoring import PromptScores, score_prompts
from pdserve.cuda.stages import Stages
from pdserve.cuda.step_inputs import InputLimits, StepInputs
from pdserve.cuda.step_rows import PromptChunk, StepRows
from pdserve.cuda.step_shape import ShapeChooser, StepShape, decode_shape, prompt_shape
from pdserve.cuda.tensor_ranks import RankWatch
from pdserve.engine.batch import StepPlan, StepResult
from pdserve.engine.warm_up import make_warm_up_plans
from pdserve.rank.backend import Announce, ExpectedResult, StepResults


@dataclass(kw_only=True, slots=True)
class RunnerCounters:
    """Totals since start."""

    steps: int = 0
    graph_steps: int = 0
    host_tokens: int = 0
    """Slices whose token the host chose: slower, and nothing is launched ahead of it."""


class CudaStep:
    """A step in flight. Its result is taken where it is sampled, and of a pipeline on rank 0."""

    def __init__(
        self,
        chosen: ChosenTokens,
        scores: Sequence[PromptScores],
        event: StepEvent,
        watches: Sequence[RankWatch],
        expected: ExpectedResult | None,
    ) -> None:
        """Keeps what will be there once the event has happened.

        Args:
            chosen: tokens.
            scores: of prompts.
            event: when the device has done this rank's part.
            watches: whether it had what it needed of other ranks.
            expected: on rank 0 of a pipeline, what the last stage will tell.
        """
        self._chosen = chosen
        self._scores = scores
        self._event = event
        self._watches = watches
        self._expected = expected

    def wait(self) -> None:
        """Waits until the device has done it, and so has the last stage.

        Raises:
            WorkerLost: another rank did not do its part.
        """
        self._event.synchronize()
        for watch in self._watches:
            watch.check()
        if self._expected is not None:
            self._expected.wait()

    def is_over(self) -> bool:
        """Says whether tokens are in host memory."""
        is_here = self._expected is None or self._expected.is_over()
        return is_here and self._event.query()

    def result(self) -> StepResult:
        """Waits, and reads tokens from host memory.

        Raises:
            WorkerLost: another rank did not do its part.
        """
        self.wait()
        if self._expected is not None:
            return self._expected.result()
        return StepResult(
            sampled=self._chosen.read(),
            prompt_logprobs={score.targets.request_id: score.read() for score in self._scores},
        )


class CudaRunner:
    """A model, its KV memory and all buffers of a step. Used by one thread."""

    def __init__(
        self,
        model: CudaModel,
        kv: KvTensors,
        device: Device,
        *,
        inputs: StepInputs,
        input_limits: InputLimits,
        max_model_len: int,
        is_deterministic: bool = False,
        graph_shapes: Sequence[StepShape] = (),
        stages: Stages | None = None,
        make_marks: Callable[[int], LayerMarks] | None = None,
    ) -> None:
        """Keeps them; graphs are captured by `capture`.

        Args:
            model: on the device.
            kv: on the device.
            device: of both.
            inputs: buffers of what steps send.
            input_limits: of those.
            max_model_len: longest sequence.
            is_deterministic: the way that tokens are batched changes no bit.
            graph_shapes: what `capture` will capture.
            stages: this rank's place among several; None: it has all layers.
            make_marks: makes what marks layers in so many steps in flight; None: nobody asks.
        """
        num_lanes = 1 if stages is None else stages.room.num_stages
        in_flight = 2 if stages is None else stages.room.max_steps_in_flight
        self.max_steps_in_flight = in_flight
        self.marks = None if make_marks is None else make_marks(in_flight)
        self.results: StepResults | None = None
        """Takes what the last stage sampled to rank 0; on these two ranks of a pipeline."""
        self.model = model
        self.kv = kv
        self.announce: Announce | None = None
        """Tells the other ranks of a step that is about to be launched; on rank 0."""
        self.counters = RunnerCounters()
        self._device = device
        self._inputs = inputs
        self._input_limits = input_limits
        self._shapes = tuple(graph_shapes)
        self._graphs = GraphSet(device, self._compute, self._send_padding)
        max_samples, vocab_size = input_limits.max_samples, model.config.vocab_size
        self._choosers = [
            TokenChooser(device, max_samples, vocab_size, model.vocabulary_share, in_flight)
            for _ in range(num_lanes)
        ]
        self._stages = stages
        self._awaited = AwaitedIds(1 if stages is None else stages.room.num_id_rows, max_samples)
        self._number = 0
        """Of the step launched last."""
        self._flying: deque[CudaStep] = deque()
        limits = _limits_of(model, kv, max_model_len, keeps_prompts_apart=is_deterministic)
        shapes, max_seqs = ShapeChooser(self._shapes), input_limits.max_seqs
        self._assembler = Assembler(inputs, shapes, limits, max_seqs, num_lanes)
        self._max_model_len = max_model_len

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> CudaStep:
        """Starts a step; waits for nothing on the device.

        Raises:
            ValueError: a slice is empty, or names tokens or blocks out of range.
        """
        self._assembler.check(plan, self._awaited.indices)
        # Before others know of the step: the last stage may answer while this one launches.
        expected = self._expect_result()
        if self.announce is not None:
            self.announce(plan)
        step = self._assembler.assemble(plan, self._awaited.indices)
        self._number += 1
        if self.marks is not None:
            self.marks.begin(self._number)
        if self._stages is not None:
            buffers = self.model.buffers(step.shape.num_rows)
            self._stages.enter(self._number, self._awaited.newest(plan), buffers)
        for source, target in plan.copies:
            self.kv.copy_block(source, target)
        self._inputs.send(step.writer, step.lane)
        logits, scores, slots = self._forward(step)
        chosen = self._choosers[step.lane].choose(logits, slots)
        if self._stages is not None:
            self._leave_stage(self._stages, step, chosen)
        rows = ((slot.part.request.request_id, slot.row) for slot in chosen.device_slots)
        self._awaited.note(self._number, rows)
        self.counters.steps += 1
        self.counters.graph_steps += step.is_captured
        self.counters.host_tokens += len(chosen.host_slots)
        return CudaStep(chosen, scores, self._device.record(), self._watch_ranks(), expected)

    def _expect_result(self) -> ExpectedResult | None:
        if self.results is None or self._stages is None or not self._stages.is_leader:
            return None
        return self.results.expect()

    def _leave_stage(self, stages: Stages, step: AssembledStep, chosen: ChosenTokens) -> None:
        """Hands on what this stage made of a step."""
        num_ids = max((slot.row + 1 for slot in chosen.device_slots), default=0)
        if not stages.is_last:
            stages.leave(self._number, self.model.buffers(step.shape.num_rows))
            if stages.is_first and num_ids:
                stages.expect_ids(self._number, num_ids)
        elif num_ids:
            stages.return_ids(self._number, self._choosers[step.lane].ids[:num_ids])

    def _watch_ranks(self) -> tuple[RankWatch, ...]:
        """Returns what tells, once the stream got here, whether all other ranks did their part."""
        watches: list[RankWatch] = []
        if self.model.ranks is not None:
            watches.append(self.model.ranks.watch())
        if self._stages is not None:
            watches.append(self._stages.watch(self._number))
        return tuple(watches)

    def run(self, plan: StepPlan) -> StepResult:
        """Computes a step and waits for it."""
        return self.launch(plan).result()

    def capture(self, shapes: Sequence[StepShape] | None = None) -> CaptureReport:
        """Captures graphs, by default all; no step may be in flight. No KV is written.

        What was captured before is captured anew.
        """
        return self._graphs.capture(self._shapes if shapes is None else shapes)

    def drop_graphs(self) -> None:
        """Gives up all graphs; for a runner that was only a trial."""
        self._graphs.drop()

    def compute(self, plan: StepPlan) -> CudaStep:
        """Launches this rank's part of a step of rank 0's, as many ahead as rank 0 does.

        Raises:
            WorkerLost: another rank did not do its part of an earlier step.
        """
        while len(self._flying) >= self.max_steps_in_flight:
            self._flying.popleft().wait()
        step = self.launch(plan)
        self._flying.append(step)
        if self.results is not None and self._stages is not None and self._stages.is_sampler:
            self.results.put(step)
        return step

    def compute_largest(self) -> None:
        """Computes padding in the largest steps, so that all memory was asked for once."""
        limits = self._input_limits
        rows = min(limits.max_rows, self._max_model_len)
        # All there is of context: its KV is gathered for a long chunk. Tables of zeros will do.
        context = (self._max_model_len - rows) // rows * rows
        last = PromptChunk(num_rows=rows, context=context)
        steps: list[tuple[StepShape, tuple[PromptChunk, ...] | None]] = [
            (decode_shape(limits.max_seqs), None),
            (prompt_shape(limits.max_rows, min(limits.max_seqs, limits.max_rows)), None),
            (prompt_shape(rows, 1), (last,)),
        ]
        for shape, chunks in steps:
            self._send_padding(shape)
            self._compute(shape, chunks)
        self._device.synchronize()

    def warm_up(self) -> None:
        """Computes a prompt tile and a decode step, whose KV nobody will read."""
        block_size = self.kv.geometry.block_size
        room = min(self.kv.num_blocks * block_size, self._max_model_len)
        for plan in make_warm_up_plans(room, block_size):
            self.run(plan)

    def _forward(
        self, step: AssembledStep
    ) -> tuple[Tensor | None, Sequence[PromptScores], Sequence[SampleSlot]]:
        """Launches a step up to its logits; says in which rows of them each slot is."""
        if step.targets:
            return self._forward_scored(step)
        if step.is_captured:
            logits = self._graphs.replay(step.shape)
            if self.marks is not None:
                self.marks.note_all_stored()
            return logits, (), step.slots
        return self._compute(step.shape, step.chunks, self._note_stored), (), step.slots

    def _send_padding(self, shape: StepShape) -> None:
        self._inputs.send(self._inputs.next_writer(shape))

    def _compute(
        self,
        shape: StepShape,
        chunks: tuple[PromptChunk, ...] | None = None,
        note_stored: NoteStored | None = None,
    ) -> Tensor | None:
        return self.model.forward(self._take(shape, chunks), self.kv, note_stored)

    @property
    def _note_stored(self) -> NoteStored | None:
        return None if self.marks is None else self.marks.note_stored

    def _take(self, shape: StepShape, chunks: tuple[PromptChunk, ...] | None) -> StepRows:
        ids = self._choosers[0].ids if self._stages is None else self._stages.ids
        return self._inputs.take(shape, ids, chunks)

    def _forward_scored(
        self, step: AssembledStep
    ) -> tuple[Tensor | None, Sequence[PromptScores], Sequence[SampleSlot]]:
        rows = self._take(step.shape, step.chunks)
        hidden = self.model.compute_hidden(rows, self.kv, self._note_stored)
        assert hidden is not None
        slots = [SampleSlot(part=slot.part, row=row) for row, slot in enumerate(step.slots)]
        if not self.model.has_head:
            return None, (), slots
        scores = score_prompts(
            hidden, self.model.score, step.targets, self._input_limits.max_samples
        )
        if not step.slots:
            return None, scores, ()
        at = torch.tensor([slot.row for slot in step.slots]).to(hidden.device, non_blocking=True)
        logits = self.model.score_share(hidden.index_select(0, at))
        return logits, scores, slots


def _limits_of(
    model: CudaModel, kv: KvTensors, max_model_len: int, *, keeps_prompts_apart: bool
) -> StepLimits:
    return StepLimits(
        block_size=kv.geometry.block_size,
        num_blocks=kv.num_blocks,
        vocab_size=model.config.vocab_size,
        max_model_len=max_model_len,
        keeps_prompts_apart=keeps_prompts_apart,
    )
