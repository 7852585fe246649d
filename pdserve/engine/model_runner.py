"""Computes step plans: from token ids and block tables to sampled tokens."""

from pdserve.cache.kv_tensors import KvTensors
from pdserve.engine.batch import StepPlan, StepResult
from pdserve.models.llama import LlamaModel


class ModelRunner:
    """A model and its KV memory. Used by one thread."""

    def __init__(self, model: LlamaModel, kv: KvTensors) -> None:
        """Keeps both; neither is copied."""
        self.model = model
        self.kv = kv

    def run(self, plan: StepPlan) -> StepResult:
        """Copies blocks, computes every slice, writes its KV and samples where asked.

        Raises:
            ValueError: a block table is too short for its slice, or a token id is out of range.
        """
        raise NotImplementedError
