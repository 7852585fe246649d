"""Rebuilds a byte-level BPE tokenizer from the metadata of a GGUF file."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufVocabulary:
    """What a GGUF file says of its tokenizer."""

    model: str
    """`gpt2` is byte-level BPE."""
    pre_tokenizer: str
    tokens: Sequence[str]
    token_types: Sequence[int]
    merges: Sequence[str]
    bos_token_id: int | None
    adds_bos: bool


def build_tokenizer(vocabulary: GgufVocabulary) -> Tokenizer:
    """Returns a tokenizer that gives the ids of the model's original one.

    Raises:
        ConfigError: the kind of tokenizer or of pre-tokenizer is not supported.
    """
    if vocabulary.model != "gpt2":
        raise ConfigError(f"GGUF tokenizer must be gpt2 (BPE), got {vocabulary.model!r}")
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(vocabulary.tokens)},
            merges=[_merge(text) for text in vocabulary.merges],
        )
    )
    _set_pre_tokenizer(tokenizer, vocabulary.pre_tokenizer)
    tokenizer.decoder = decoders.ByteLevel()
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
    if vocabulary.adds_bos and vocabulary.bos_token_id is not None:
        bos = vocabulary.tokens[vocabulary.bos_token_id]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, vocabulary.bos_token_id)]
        )
    return tokenizer


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
        split = pre_tokenizers.Split(Regex(QWEN2_SPLIT), behavior="isolated")
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, plain])
    else:
        raise ConfigError(
            f"GGUF pre-tokenizer {name!r} is not supported; known: default, gpt-2, qwen2, smollm"
        )
