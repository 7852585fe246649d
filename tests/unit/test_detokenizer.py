import itertools
import json
import random
import time

import pytest

from pdserve.detokenizer import Detokenizer, StopFinder, TokenTable, detokenize
from pdserve.errors import ConfigError
from tests.support.text_models import byte_fallback_tokenizer, byte_level_tokenizer

TEXTS = (
    "the quick brown fox",
    "größer 東京 🙂🙃 — naïve",
    "a👩‍👩‍👧‍👦b",
    "\n\ttabs and\r\nlines  two spaces",
    "日本語" * 20,
)
TOKENIZERS = {
    "trained": byte_level_tokenizer,
    "bytes_only": lambda: byte_level_tokenizer(259),
    "byte_fallback": byte_fallback_tokenizer,
}


@pytest.fixture(params=TOKENIZERS, scope="module")
def tokenizer(request):
    return TOKENIZERS[request.param]()


@pytest.fixture(scope="module")
def table(tokenizer):
    return TokenTable.from_tokenizer_json(tokenizer.to_str())


@pytest.mark.parametrize("text", TEXTS)
def test_D9_the_pieces_join_to_the_full_decode(tokenizer, table, text):
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    detokenizer = Detokenizer(table)
    pieces = [detokenizer.push(token) for token in ids] + [detokenizer.flush()]
    assert "".join(pieces) == tokenizer.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)


def test_D9_random_mixtures_join_to_the_full_decode(tokenizer, table):
    rng = random.Random(7)
    for _ in range(100):
        text = "".join(rng.choice("abc ñ東🙂\n.é") for _ in range(rng.randrange(1, 60)))
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        detokenizer = Detokenizer(table)
        joined = "".join(map(detokenizer.push, ids)) + detokenizer.flush()
        assert joined == tokenizer.decode(ids)


@pytest.mark.parametrize("skip", [True, False])
def test_a_whole_text_is_what_its_tokens_bring_one_by_one(table, skip):
    rng = random.Random(11)
    for length in (0, 1, 2, 50, 400):
        # Any ids: broken characters, special tokens and ids beyond the vocabulary among them.
        ids = [rng.randrange(len(table.token_bytes) + 3) for _ in range(length)]
        detokenizer = Detokenizer(table, skip_special_tokens=skip)
        pieces = [*map(detokenizer.push, ids), detokenizer.flush()]
        assert detokenize(table, ids, skip_special_tokens=skip) == "".join(pieces)


def test_an_output_that_ends_inside_a_character_is_marked_at_the_end_only():
    table = TokenTable.from_tokenizer_json(byte_level_tokenizer(259).to_str())
    ids = byte_level_tokenizer(259).encode("x🙂").ids
    detokenizer = Detokenizer(table)
    assert [detokenizer.push(token) for token in ids[:-1]] == ["x", "", "", ""]
    assert detokenizer.flush() == "\ufffd"


def test_special_tokens_are_text_only_when_asked_for():
    table = TokenTable.from_tokenizer_json(byte_level_tokenizer().to_str())
    assert Detokenizer(table).push(2) == ""
    assert Detokenizer(table, skip_special_tokens=False).push(2) == "<|im_end|>"


def test_an_id_without_a_token_has_no_text():
    table = TokenTable.from_tokenizer_json(byte_level_tokenizer().to_str())
    assert Detokenizer(table).push(1_000_000) == ""


def test_D9_the_cost_of_a_token_does_not_grow_with_the_text():
    table = TokenTable.from_tokenizer_json(byte_level_tokenizer().to_str())
    detokenizer = Detokenizer(table)
    stops = StopFinder(("never\0",))
    costs_s = []
    for _ in range(32):
        began_s = time.perf_counter()
        for token in range(10, 10 + 256):
            stops.push(detokenizer.push(token))
            stops.push(detokenizer.push(token))
            stops.push(detokenizer.push(token))
            stops.push(detokenizer.push(token))
        costs_s.append(time.perf_counter() - began_s)
    # Best of each half: noise of a busy machine only adds.
    assert min(costs_s[16:]) < 3 * min(costs_s[:16])


@pytest.mark.parametrize("kind", ["WordPiece", None])
def test_an_unknown_family_is_refused_by_name(kind):
    spec = {"model": {"vocab": {"a": 0}}, "decoder": {"type": kind} if kind else None}
    with pytest.raises(ConfigError, match=kind or "none"):
        TokenTable.from_tokenizer_json(json.dumps(spec))


def _run(stops, pieces, **over):
    finder = StopFinder(stops, **over)
    shown = ""
    for piece in pieces:
        shown += finder.push(piece)
        if finder.matched is not None:
            return shown, finder.matched
    return shown + finder.flush(), None


@pytest.mark.parametrize("cut", range(1, 11))
def test_D8_a_stop_is_found_at_every_token_border(cut):
    text = "abcSTOPdef!"
    assert _run(("STOP",), [text[:cut], text[cut:]]) == ("abc", "STOP")


def test_D8_a_stop_spread_over_single_characters_is_found():
    assert _run(("\n\nUser:",), list("hello\n\nUser: hi")) == ("hello", "\n\nUser:")


def test_D8_text_that_only_begins_like_a_stop_is_released():
    assert _run(("STOP",), ["ab", "ST", "OX", "ST"]) == ("abSTOXST", None)


def test_text_is_not_held_back_longer_than_a_stop_could_need():
    finder = StopFinder(("STOP",))
    assert finder.push("hello S") == "hello "
    assert finder.push("x") == "Sx"


@pytest.mark.parametrize("order", [("abc", "abcd"), ("abcd", "abc")])
@pytest.mark.parametrize("pieces", [["xabcd"], ["xab", "cd"], list("xabcd")])
def test_D8_of_two_stops_with_one_prefix_the_first_complete_wins(order, pieces):
    assert _run(order, pieces) == ("x", "abc")


@pytest.mark.parametrize("pieces", [["zab"], ["za", "b"]])
def test_of_two_stops_that_end_together_the_longer_wins(pieces):
    assert _run(("b", "ab"), pieces) == ("z", "ab")


def test_overlapping_beginnings_of_a_stop_are_not_missed():
    assert _run(("aab",), list("aaab")) == ("a", "aab")


def test_a_stop_may_be_included():
    assert _run(("STOP",), ["aST", "OPb"], include_stop=True) == ("aSTOP", "STOP")


def test_the_quick_way_and_the_decoder_take_turns_without_losing_a_byte():
    table = TokenTable(
        token_bytes=(b"\xe2\x82", b"\xac", b"a", b"\xff", b"", None, "ü€".encode()),
        special_ids=frozenset(),
    )
    for tokens in itertools.product(range(7), repeat=4):
        detokenizer = Detokenizer(table)
        shown = "".join(detokenizer.push(token) for token in tokens) + detokenizer.flush()
        expected = b"".join(table.token_bytes[token] or b"" for token in tokens)
        assert shown == expected.decode(errors="replace")
