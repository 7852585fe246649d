"""The oracle for token ids: transformers, in float32, one request at a time."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


class OracleModel:
    """A model folder loaded by transformers."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        torch.set_num_threads(1)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    def generate(self, token_ids: Sequence[int], num_tokens: int) -> list[int]:
        """Returns greedy output that stops at no token."""
        prompt = torch.tensor([token_ids])
        output = self._model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        tokens: list[int] = output[0, len(token_ids) :].tolist()
        return tokens

    @torch.inference_mode()
    def last_logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Returns float32 logits behind the last token."""
        logits: torch.Tensor = self._model(torch.tensor([token_ids])).logits[0, -1].float()
        return logits
