"""Makes a model from a folder."""

from pathlib import Path

from pdserve.config.engine import EngineConfig
from pdserve.models.llama import LlamaModel


def load_model(folder: Path, engine: EngineConfig) -> LlamaModel:
    """Loads a model in the engine's dtype and packs its weights.

    Raises:
        ConfigError: the folder lacks something or holds a model that is not supported.
    """
    raise NotImplementedError
