import json

import pytest

from pdserve.errors import InvalidField
from router.openai.body import parse_object
from router.openai.fields import Fields, as_ids

LONG = json.dumps({"prompt": list(range(30_000)), "max_tokens": 3, "top_p": 0.5}).encode()


def test_a_parser_that_lets_threads_run_reads_the_same():
    assert parse_object(LONG, int_of=int) == parse_object(LONG)


@pytest.mark.parametrize(
    "body", [b"[1]", b'{"a": NaN}', b'{"a": 1', b'{"a": ' + b"9" * 5000 + b"}"]
)
def test_a_parser_that_lets_threads_run_refuses_the_same(body):
    for int_of in (None, int):
        with pytest.raises(InvalidField):
            parse_object(body, int_of=int_of)


def test_a_number_of_too_many_digits_is_refused_in_our_words():
    with pytest.raises(InvalidField, match="too many digits") as caught:
        parse_object(b'{"a": ' + b"9" * 5000 + b"}")
    assert "sys." not in str(caught.value)


@pytest.mark.parametrize("bad", [-1, 2**32, True, 1.0, "1", None])
def test_the_place_of_a_bad_token_id_is_named(bad):
    with pytest.raises(InvalidField) as caught:
        as_ids("prompt", [1, 2, bad, 4])
    assert caught.value.field == "prompt[2]"


@pytest.mark.parametrize("good", [[], [0], [2**32 - 1, 5]])
def test_token_ids_of_32_bits_are_taken(good):
    assert as_ids("prompt", good) == good


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (b"[1]", "array"),
        (b'"x"', "string"),
        (b"1.5", "number"),
        (b"true", "boolean"),
        (b"null", "null"),
    ],
)
def test_what_stands_for_a_body_is_called_as_in_json(body, shown):
    with pytest.raises(InvalidField) as caught:
        parse_object(body)
    assert str(caught.value) == f"body must be a JSON object, got {shown}"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ([1, 2], "array of 2"),
        ({"a": 1}, "object of 1"),
        (True, "true"),
        (5, "5"),
        (0.5, "0.5"),
        (2**200, "a number of 201 bits"),
    ],
)
def test_a_wrong_value_is_shown_as_in_json(value, shown):
    with pytest.raises(InvalidField) as caught:
        Fields({"user": value}).text("user")
    assert str(caught.value) == f"user must be a string, got {shown}"


def test_a_wrong_string_is_shown_in_quotes_and_null_as_null():
    with pytest.raises(InvalidField, match="got 'yes'"):
        Fields({"stream": "yes"}).flag("stream")
    with pytest.raises(InvalidField, match="got null"):
        as_ids("prompt", [None])
