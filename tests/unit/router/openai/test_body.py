import json

import pytest

from pdserve.errors import InvalidField
from router.openai.body import parse_object
from router.openai.fields import as_ids

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


@pytest.mark.parametrize("bad", [-1, 2**32, True, 1.0, "1", None])
def test_the_place_of_a_bad_token_id_is_named(bad):
    with pytest.raises(InvalidField) as caught:
        as_ids("prompt", [1, 2, bad, 4])
    assert caught.value.field == "prompt[2]"


@pytest.mark.parametrize("good", [[], [0], [2**32 - 1, 5]])
def test_token_ids_of_32_bits_are_taken(good):
    assert as_ids("prompt", good) == good
