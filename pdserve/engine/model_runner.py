"""Computes step plans: from token ids and block tables to sampled tokens."""

from pdserve.cache.kv_tensors import KvTensors
from pdserve.engine.batch import StepPlan, StepResult
from pdserve.engine.forward_batch import build_batch
from pdserve.models.llama import LlamaModel
from pdserve.sampler import SamplingRow, sample


class ModelRunner:
    """A model and its KV memory. Used by one thread."""

    def __init__(self, model: LlamaModel, kv: KvTensors) -> None:
        """Keeps both; neither is copied.

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

    def run(self, plan: StepPlan) -> StepResult:
        """Copies blocks, computes every slice, writes its KV and samples where asked.

        Raises:
            ValueError: a slice is empty, names tokens or blocks out of range, or is longer than
                the model allows.
        """
        for source, target in plan.copies:
            self.kv.copy_block(source, target)
        self._check(plan)
        batch = build_batch(plan, self.kv.geometry.block_size)
        logits = self.model.forward(batch, self.kv)
        rows = [part for part in plan.slices if part.output_index is not None]
        sampled = {}
        for index, part in enumerate(rows):
            assert part.output_index is not None
            row = SamplingRow(
                params=part.request.sampling,
                output_index=part.output_index,
                stop_ids=part.request.stop_ids,
            )
            sampled[part.request.request_id] = sample(logits[index], row)
        return StepResult(sampled=sampled)

    def _check(self, plan: StepPlan) -> None:
        """Refuses what would read or write outside of a tensor."""
        vocab_size = self.model.config.vocab_size
        for part in plan.slices:
            request_id = part.request.request_id
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
