"""Computes step plans: from token ids and block tables to sampled tokens."""

from collections.abc import Callable
from dataclasses import dataclass

from pdserve.cache.kv_tensors import KvTensors
from pdserve.engine.batch import StepPlan, StepResult
from pdserve.engine.forward_batch import build_batch
from pdserve.engine.host_sampling import sample_slice
from pdserve.engine.warm_up import make_warm_up_plans
from pdserve.layers.parallel import Arriving
from pdserve.models.llama import LlamaModel
from pdserve.request import (
    RequestId,
    SampledToken,
)
from pdserve.sampler import score_token


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """A step whose logits may still be on their way from the last stage."""

    plan: StepPlan
    logits: Arriving

    def is_over(self) -> bool:
        """Says whether the logits are here."""
        return self.logits.is_here

    def wait(self) -> None:
        """Waits for them."""
        self.logits.wait()

    def result(self) -> StepResult:
        """Waits for logits, then samples where asked."""
        # At most a row per token of the step: its token budget bounds the memory.
        rows = iter(self.logits.wait())
        sampled: dict[RequestId, SampledToken] = {}
        prompt_logprobs = {}
        for part in self.plan.slices:
            if part.prompt_targets:
                num_top = part.request.sampling.prompt_logprobs or 0
                scored = [
                    score_token(next(rows), target, num_top) for target in part.prompt_targets
                ]
                prompt_logprobs[part.request.request_id] = tuple(scored)
            if part.output_index is not None:
                sampled |= sample_slice(part, next(rows))
        return StepResult(sampled=sampled, prompt_logprobs=prompt_logprobs)


class ModelRunner:
    """A model and its KV memory; the `StepRunner` of a CPU."""

    def __init__(
        self,
        model: LlamaModel,
        kv: KvTensors,
        announce: Callable[[StepPlan], None] | None = None,
    ) -> None:
        """Keeps both; neither is copied.

        Args:
            model: the whole, or this rank's part.
            kv: its memory.
            announce: tells the other ranks of a step that is about to be computed.

        Raises:
            ValueError: the KV memory was made for another shape of model.
        """
        config, geometry = model.config, kv.geometry
        model_shape = (config.num_layers, config.num_kv_heads, config.head_dim)
        kv_shape = (geometry.num_layers, geometry.num_kv_heads, geometry.head_dim)
        if model_shape != kv_shape:
            raise ValueError(
                f"KV of (layers, heads, head dim) {kv_shape} does not fit a model of {model_shape}"
            )
        self.model = model
        self.kv = kv
        self._announce = announce

    @property
    def max_steps_in_flight(self) -> int:
        """One for each stage: the step is through this one before `launch` returns."""
        return self.model.num_stages

    def launch(self, plan: StepPlan) -> ComputedStep:
        """Copies blocks, computes every slice and writes its KV, on this very thread.

        Later stages of the pipeline do their part meanwhile.

        Raises:
            ValueError: a slice is empty, names tokens or blocks out of range, or is longer than
                the model allows.
        """
        self._check(plan)
        if self._announce is not None:
            self._announce(plan)
        return ComputedStep(plan, self.compute(plan))

    def run(self, plan: StepPlan) -> StepResult:
        """Computes a step, waits for it and samples; raises what `launch` raises."""
        return self.launch(plan).result()

    def compute(self, plan: StepPlan) -> Arriving:
        """Does this rank's part of a step, which all ranks do; returns rank 0's logits."""
        for source, target in plan.copies:
            self.kv.copy_block(source, target)
        batch = build_batch(plan, self.kv.geometry.block_size)
        return self.model.forward(batch, self.kv)

    def warm_up(self) -> None:
        """Computes a prompt tile and a decode step, whose KV nobody will read.

        The first pass of each kind makes oneDNN's primitives and touches all weights: 0.8 s for
        135 million float32 parameters on one core, which no request should pay for.
        """
        block_size = self.kv.geometry.block_size
        room = min(self.kv.num_blocks * block_size, self.model.max_model_len)
        for plan in make_warm_up_plans(room, block_size):
            self.run(plan)

    def _check(self, plan: StepPlan) -> None:
        """Refuses what would read or write outside of a tensor."""
        vocab_size = self.model.config.vocab_size
        for part in plan.slices:
            request_id = part.request.request_id
            if part.awaits_token:
                raise ValueError(f"request {request_id} awaits a token, which only a device knows")
            if part.end > self.model.max_model_len:
                raise ValueError(
                    f"request {request_id} reaches {part.end} tokens, "
                    f"over the limit of {self.model.max_model_len}"
                )
            for token_id in part.token_ids:
                if not 0 <= token_id < vocab_size:
                    raise ValueError(
                        f"request {request_id}: token id must be in [0, {vocab_size}), "
                        f"got {token_id}"
                    )
            for block_id in part.block_ids:
                if not 0 <= block_id < self.kv.num_blocks:
                    raise ValueError(
                        f"request {request_id}: block id must be in [0, {self.kv.num_blocks}), "
                        f"got {block_id}"
                    )
