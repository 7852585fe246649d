"""The Llama family: Llama, Mistral, SmolLM2 and Qwen2."""

from pdserve.config.model import ModelConfig


class LlamaModel:
    """A decoder-only transformer with packed weights."""

    config: ModelConfig
