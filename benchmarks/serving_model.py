"""A model folder of Llama-3-8B's shape without weights, with a tokenizer of as many tokens."""

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from string import ascii_letters, digits

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from benchmarks.gpu_engine import LLAMA_3_8B

SPECIAL_TOKENS = ("<|begin_of_text|>", "<|end_of_text|>")


def make_model_folder(folder: Path) -> Path:
    """Writes config.json and the tokenizer; weights are dummies anyway.

    Returns:
        The folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA_3_8B))
    vocab_size = LLAMA_3_8B["vocab_size"]
    assert isinstance(vocab_size, int)
    make_tokenizer(vocab_size).save(str(folder / "tokenizer.json"))
    settings = {"bos_token": SPECIAL_TOKENS[0], "eos_token": SPECIAL_TOKENS[1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def make_tokenizer(vocab_size: int) -> Tokenizer:
    """Returns a byte-level BPE: bytes, then pairs and triples of letters and digits.

    Every id has a text, so that what a router does for a token is what it does in earnest.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: index for index, text in enumerate(alphabet)}
    merges = []
    room = vocab_size - len(SPECIAL_TOKENS)
    for parts in _pieces():
        if len(vocab) == room:
            break
        merges.append(parts)
        vocab["".join(parts)] = len(vocab)
    assert len(vocab) == room, f"a vocabulary of {vocab_size} is beyond what three letters make"
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS]
    )
    return tokenizer


def _pieces() -> Iterator[tuple[str, str]]:
    symbols = ascii_letters + digits
    pairs = [first + second for first, second in product(symbols, symbols)]
    yield from product(symbols, symbols)
    yield from product(pairs, symbols)
