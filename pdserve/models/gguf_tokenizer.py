"""Rebuilds a tokenizer from the metadata of a GGUF file: byte-level BPE, or SentencePiece BPE."""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from pdserve.errors import ConfigError

CONTROL_TOKEN_TYPE = 3
USER_DEFINED_TOKEN_TYPE = 4

QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")

WORD_START = "\u2581"
NORMAL_TOKEN_TYPE = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufVocabulary:
    """What a GGUF file says of its tokenizer."""

    model: str
    """`gpt2` is byte-level BPE, `llama` SentencePiece BPE."""
    pre_tokenizer: str
    tokens: Sequence[str]
    token_types: Sequence[int]
    bos_token_id: int | None
    merges: Sequence[str] | None = None
    """Of byte-level BPE."""
    scores: Sequence[float] | None = None
    """Of SentencePiece, the better the earlier a token is merged."""
    unknown_token_id: int | None = None
    adds_bos: bool | None = None
    """None where the file does not say."""
    adds_space_prefix: bool = True


def build_tokenizer(vocabulary: GgufVocabulary) -> Tokenizer:
    """Returns a tokenizer that gives the ids of the model's original one.

    Raises:
        ConfigError: the kind of tokenizer or of pre-tokenizer is not supported.
    """
    if vocabulary.model == "gpt2":
        tokenizer = _byte_level(vocabulary)
        adds_bos = vocabulary.pre_tokenizer in LLAMA3_NAMES
    elif vocabulary.model == "llama":
        tokenizer = _sentencepiece(vocabulary)
        adds_bos = True
    else:
        raise ConfigError(f"GGUF tokenizer must be gpt2 or llama, got {vocabulary.model!r}")
    if vocabulary.adds_bos is not None:
        adds_bos = vocabulary.adds_bos
    kinds = list(zip(vocabulary.tokens, vocabulary.token_types, strict=True))
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in kinds
            if kind == CONTROL_TOKEN_TYPE
        ]
    )
    tokenizer.add_tokens(
        [
            AddedToken(token, special=False, normalized=False)
            for token, kind in kinds
            if kind == USER_DEFINED_TOKEN_TYPE
        ]
    )
    if adds_bos and vocabulary.bos_token_id is not None:
        bos = vocabulary.tokens[vocabulary.bos_token_id]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, vocabulary.bos_token_id)]
        )
    return tokenizer


def _byte_level(vocabulary: GgufVocabulary) -> Tokenizer:
    if vocabulary.merges is None:
        raise ConfigError("GGUF tokenizer: tokenizer.ggml.merges is missing")
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(vocabulary.tokens)},
            merges=[_merge(text) for text in vocabulary.merges],
            ignore_merges=vocabulary.pre_tokenizer in LLAMA3_NAMES,
        )
    )
    _set_pre_tokenizer(tokenizer, vocabulary.pre_tokenizer)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(vocabulary: GgufVocabulary) -> Tokenizer:
    """Follows the layout that Llama 2 and Mistral have in transformers."""
    if vocabulary.scores is None or len(vocabulary.scores) != len(vocabulary.tokens):
        raise ConfigError("GGUF tokenizer: tokenizer.ggml.scores must name every token's score")
    unknown = vocabulary.unknown_token_id or 0
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(vocabulary.tokens)},
            merges=_merges_by_score(vocabulary, vocabulary.scores),
            unk_token=vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", WORD_START)
    before = [normalizers.Prepend(WORD_START)] if vocabulary.adds_space_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*before, spaces])
    parts = [decoders.Replace(WORD_START, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.adds_space_prefix:
        parts.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


def _merges_by_score(vocabulary: GgufVocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """Lists every way to join two tokens into a third, the best result first."""
    index_of = {token: index for index, token in enumerate(vocabulary.tokens)}
    found: list[tuple[float, int, int, str, str]] = []
    for index, token in enumerate(vocabulary.tokens):
        if vocabulary.token_types[index] != NORMAL_TOKEN_TYPE:
            continue
        for cut in range(1, len(token)):
            left, right = index_of.get(token[:cut]), index_of.get(token[cut:])
            if left is not None and right is not None:
                found.append((-scores[index], left, right, token[:cut], token[cut:]))
    found.sort()
    return [(left, right) for _, _, _, left, right in found]


def _merge(text: str) -> tuple[str, str]:
    left, separator, right = text.partition(" ")
    if not separator:
        raise ConfigError(f"GGUF tokenizer: a merge must be two tokens, got {text!r}")
    return left, right


def _set_pre_tokenizer(tokenizer: Tokenizer, name: str) -> None:
    """Follows the table of pre-tokenizers in llama.cpp (`llama-vocab.cpp`)."""
    with_regex = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in ("gpt-2", "default"):
        tokenizer.pre_tokenizer = with_regex
    elif name == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, with_regex])
    elif name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = _split_by(QWEN2_SPLIT)
    elif name in LLAMA3_NAMES or name == "smaug-bpe":
        tokenizer.pre_tokenizer = _split_by(LLAMA3_SPLIT)
    else:
        known = "default, gpt-2, llama-bpe, qwen2, smaug-bpe, smollm"
        raise ConfigError(f"GGUF pre-tokenizer {name!r} is not supported; known: {known}")


def _split_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, plain])
