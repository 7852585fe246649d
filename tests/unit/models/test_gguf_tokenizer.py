"""Tokenizers rebuilt from the metadata of GGUF files."""

from itertools import pairwise

import pytest
from tokenizers import pre_tokenizers

from pdserve.detokenizer import TokenTable
from pdserve.errors import ConfigError
from pdserve.models.gguf_tokenizer import GgufVocabulary, build_tokenizer

WORD_START = "\u2581"
WORDS = ("the", "then", "there", "he", "her", "ere", "re", "th", "en", "an", "and", "nd")
TEXTS = ("the hen and her", "then there", " a  b", "caf\u00e9 \u4e16", "the</s>", "")


def sentencepiece_vocabulary(**over: object) -> GgufVocabulary:
    """A vocabulary as Llama 2's: three control tokens, 256 bytes, letters, then words by score."""
    letters = [WORD_START, *"abcdefghijklmnopqrstuvwxyz"]
    words = [*(w for w in WORDS), *(WORD_START + w for w in WORDS), WORD_START + "t"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, *letters]
    kinds = [2, 3, 3, *[6] * 256, *[1] * (len(words) + len(letters))]
    scores = [0.0] * 259 + [-float(index) for index in range(len(words) + len(letters))]
    fields: dict[str, object] = {
        "model": "llama",
        "pre_tokenizer": "default",
        "tokens": tokens,
        "token_types": kinds,
        "scores": scores,
        "bos_token_id": 1,
        "unknown_token_id": 0,
    }
    return GgufVocabulary(**(fields | over))  # type: ignore[arg-type]  # test settings


def merge_greedily(vocabulary: GgufVocabulary, text: str) -> list[str]:
    """SentencePiece BPE by its definition: join the neighbours that make the best token."""
    assert vocabulary.scores is not None
    score_of = dict(zip(vocabulary.tokens, vocabulary.scores, strict=True))
    symbols = list(WORD_START + text.replace(" ", WORD_START))
    while True:
        pairs = [
            (-score_of[left + right], index)
            for index, (left, right) in enumerate(pairwise(symbols))
            if left + right in score_of
        ]
        if not pairs:
            return symbols
        _, index = min(pairs)
        symbols[index : index + 2] = [symbols[index] + symbols[index + 1]]


@pytest.mark.parametrize("text", ["the hen and her", "then there", "hereandthere", " a  ther"])
def test_sentencepiece_joins_the_best_pair_first(text: str) -> None:
    vocabulary = sentencepiece_vocabulary()
    tokens = build_tokenizer(vocabulary).encode(text).tokens
    assert tokens == ["<s>", *merge_greedily(vocabulary, text)]


@pytest.mark.parametrize("text", TEXTS)
def test_sentencepiece_text_comes_back(text: str) -> None:
    tokenizer = build_tokenizer(sentencepiece_vocabulary())
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False).removeprefix("<s>").strip() == (
        text.strip()
    )


def test_sentencepiece_falls_back_to_bytes_and_knows_control_tokens() -> None:
    tokenizer = build_tokenizer(sentencepiece_vocabulary(adds_bos=False))
    assert tokenizer.encode("\u00e9").tokens == [WORD_START, "<0xC3>", "<0xA9>"]
    assert tokenizer.encode("a</s>").tokens == [WORD_START, "a", "</s>"]
    table = TokenTable.from_tokenizer_json(tokenizer.to_str())
    assert table.token_bytes[3 + 0xC3] == b"\xc3"


def test_a_space_is_put_before_the_text_only_where_the_file_says_so() -> None:
    tokenizer = build_tokenizer(sentencepiece_vocabulary(adds_space_prefix=False))
    assert tokenizer.encode("the").tokens == ["<s>", "the"]


def test_scores_are_needed() -> None:
    with pytest.raises(ConfigError, match="scores must name every token"):
        build_tokenizer(sentencepiece_vocabulary(scores=None))


def byte_level_vocabulary(pre_tokenizer: str, **over: object) -> GgufVocabulary:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|begin|>", *alphabet, "12", "123", "hello", "he"]
    fields: dict[str, object] = {
        "model": "gpt2",
        "pre_tokenizer": pre_tokenizer,
        "tokens": tokens,
        "token_types": [3, *[1] * (len(tokens) - 1)],
        "merges": ["1 2", "12 3", "h e"],
        "bos_token_id": 0,
    }
    return GgufVocabulary(**(fields | over))  # type: ignore[arg-type]  # test settings


def test_llama3_takes_three_digits_at_once_whole_words_and_a_first_token() -> None:
    tokenizer = build_tokenizer(byte_level_vocabulary("llama-bpe"))
    assert tokenizer.encode("12312").tokens == ["<|begin|>", "123", "12"]
    assert tokenizer.encode("hello").tokens == ["<|begin|>", "hello"]


def test_other_byte_level_tokenizers_merge_step_by_step() -> None:
    tokenizer = build_tokenizer(byte_level_vocabulary("smaug-bpe"))
    assert tokenizer.encode("hello").tokens == ["he", "l", "l", "o"]


def test_what_the_file_says_of_the_first_token_wins() -> None:
    tokenizer = build_tokenizer(byte_level_vocabulary("llama-bpe", adds_bos=False))
    assert tokenizer.encode("12").tokens == ["12"]


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"model": "bert"}, "must be gpt2 or llama, got 'bert'"),
        ({"merges": None}, "merges is missing"),
        ({"merges": ["ab"]}, "a merge must be two tokens"),
        ({"pre_tokenizer": "tekken"}, "'tekken' is not supported"),
    ],
)
def test_what_is_not_supported_is_named(over: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_tokenizer(byte_level_vocabulary(**({"pre_tokenizer": "gpt-2"} | over)))  # type: ignore[arg-type]  # test settings
