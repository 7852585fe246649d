"""Model folders without weights, which are dummies anyway, with a tokenizer of as many tokens."""

import json
from collections.abc import Mapping
from pathlib import Path

from benchmarks.byte_tokenizer import SPECIAL_TOKENS, make_tokenizer
from benchmarks.shapes import LLAMA_3_8B


def make_model_folder(folder: Path, config: Mapping[str, object] = LLAMA_3_8B) -> Path:
    """Writes config.json and the tokenizer.

    Returns:
        The folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    vocab_size = config["vocab_size"]
    assert isinstance(vocab_size, int)
    make_tokenizer(vocab_size).save(str(folder / "tokenizer.json"))
    settings = {"bos_token": SPECIAL_TOKENS[0], "eos_token": SPECIAL_TOKENS[1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
