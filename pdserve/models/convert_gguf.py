"""Turns a GGUF file into a model folder in Hugging Face layout, once."""

from pathlib import Path


def convert_gguf(gguf: Path, target: Path) -> None:
    """Writes config, weights (float32) and tokenizer of a llama or qwen2 GGUF into `target`.

    Does nothing if `target` exists. The folder appears whole or not at all: it is written beside
    its place and renamed. The caller names the target after the file's digest.

    Raises:
        ConfigError: the file is no GGUF, or holds something that is not supported.
    """
    raise NotImplementedError
