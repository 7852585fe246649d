"""Makes a model from a folder."""

import logging
from pathlib import Path

import torch

from pdserve.config.engine import EngineConfig
from pdserve.layers.parallel import Shard
from pdserve.models.folder import effective_max_model_len, read_model_config
from pdserve.models.llama import LlamaModel
from pdserve.models.weights import WeightSource
from pdserve.models.weights_dummy import DummyWeights
from pdserve.models.weights_safetensors import SafetensorsWeights

logger = logging.getLogger(__name__)


def load_model(folder: Path, engine: EngineConfig, shard: Shard | None = None) -> LlamaModel:
    """Loads a model in the engine's dtype and packs its weights.

    Sets torch to one thread for the whole process: between busy processes, OpenMP barriers cost
    fifty times what they gain, and the split of a reduction over threads would change bits.

    Raises:
        ConfigError: the folder lacks something or holds a model that is not supported.
    """
    torch.set_num_threads(1)
    config = read_model_config(folder)
    max_model_len = effective_max_model_len(config, engine.max_model_len)
    source: WeightSource
    if engine.load_format == "dummy":
        source = DummyWeights(engine.seed)
    else:
        source = SafetensorsWeights(folder)
    model = LlamaModel(config, engine.dtype, max_model_len, source, shard)
    extra = {"folder": str(folder), "dtype": engine.dtype, "revision": config.revision}
    logger.info("model loaded", extra=extra)
    return model
