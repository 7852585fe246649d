"""A byte-level tokenizer of any size, made on the spot: every id has a text."""

from collections.abc import Iterator
from itertools import product
from string import ascii_letters, digits

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<|begin_of_text|>", "<|end_of_text|>")


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
