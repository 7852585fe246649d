import math
from dataclasses import replace

import pytest

from pdserve.errors import InvalidField, ModelNotFound, TooLong
from pdserve.rpc.v1 import inference_pb2, types_pb2
from router.validation import (
    ModelLimits,
    check_model,
    check_prompt_form,
    check_prompt_tokens,
    check_request_id,
    check_sampling,
)

LIMITS = ModelLimits(
    served_name="tiny",
    vocab_size=100,
    max_model_len=64,
    special_ids=frozenset({0, 1, 2}),
    max_token_characters=8,
)


def _sampling(num_prompt_tokens: int = 10, **fields: object):
    wire = types_pb2.SamplingParams(**fields)
    return check_sampling(wire, num_prompt_tokens, LIMITS, lambda: 42)


NAN, INF = math.nan, math.inf
REFUSED = [
    ("temperature", [NAN, INF, -INF, -0.1, -1e-300, 100.1, 1e308]),
    ("top_p", [NAN, INF, -INF, 0.0, -0.0, -1.0, 1.0000001, 2.0]),
    ("top_k", [-1, -(2**31)]),
    ("min_p", [NAN, INF, 1.0000001, -1e-300, -1.0]),
    ("presence_penalty", [NAN, INF, -INF, 2.0000001, -2.1]),
    ("frequency_penalty", [NAN, INF, -INF, 2.0000001, -2.1]),
    ("repetition_penalty", [NAN, INF, 0.0, 100.1, -1.0]),
    ("n", [0, -1, 9, 16_384, 2**31 - 1]),
    ("max_tokens", [0, -1, -(2**63)]),
    ("min_tokens", [-1, 2**31, 2**63 - 1, 55]),
    ("logprobs", [-1, 21, 2**31 - 1]),
    ("prompt_logprobs", [-1, 21, 2**31 - 1]),
    ("stop_token_ids", [[100], [2**32 - 1], [1] * 129]),
    ("logit_bias", [{100: 1.0}, {2**32 - 1: 0.0}, dict.fromkeys(range(1025), 0.0)]),
]


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in REFUSED for value in values]
)
def test_D4_a_value_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(InvalidField) as caught:
        _sampling(**{name: value})
    assert caught.value.field == f"sampling.{name}"
    assert len(str(caught.value)) < 300


ACCEPTED = [
    ("temperature", [0.0, 1e-300, 5e-324, 1.0, 100.0]),
    ("top_p", [1.0, 1e-300, 0.5]),
    ("top_k", [0, 1, 2**31 - 1]),
    ("seed", [0, 1, 2**64 - 1]),
    ("max_tokens", [1, 54]),
    ("min_tokens", [0, 54]),
    ("logprobs", [0, 20]),
    ("ignore_eos", [True, False]),
    ("skip_special_tokens", [True, False]),
    ("include_stop_in_output", [True, False]),
    ("n", [1, 2, 8]),
    ("min_p", [0.0, 1e-300, 1.0]),
    ("presence_penalty", [-2.0, 0.0, 2.0]),
    ("frequency_penalty", [-2.0, 0.0, 2.0]),
    ("repetition_penalty", [0.01, 1.0, 100.0]),
    ("prompt_logprobs", [0, 20]),
    ("echo", [True, False]),
]


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in ACCEPTED for value in values]
)
def test_D4_a_value_at_the_edge_of_its_range_is_kept(name, value):
    assert vars_of(_sampling(**{name: value}))[name] == value


def vars_of(sampling) -> dict[str, object]:
    return {name: getattr(sampling, name) for name in type(sampling).__dataclass_fields__}


@pytest.mark.parametrize(
    ("name", "neutral"),
    [
        ("min_p", 0.0),
        ("presence_penalty", 0.0),
        ("frequency_penalty", 0.0),
        ("repetition_penalty", 1.0),
        ("n", 1),
        ("echo", False),
    ],
)
def test_what_is_not_supported_may_be_given_its_neutral_value(name, neutral):
    assert _sampling(**{name: neutral}) == _sampling()


@pytest.mark.parametrize("bias", [NAN, INF, -INF, 100.1, -101.0])
def test_D4_a_bias_out_of_range_is_refused_by_its_token(bias):
    with pytest.raises(InvalidField) as caught:
        _sampling(logit_bias={7: 1.0, 3: bias})
    assert caught.value.field == "sampling.logit_bias[3]"


def test_biases_are_ordered_by_token():
    assert _sampling(logit_bias={99: 100.0, 0: -100.0}).logit_bias == ((0, -100.0), (99, 100.0))


@pytest.mark.parametrize(("num_prompt_tokens", "value"), [(2**18, 0), (2**17, 1), (12483, 20)])
def test_D5_prompt_logprobs_are_bounded_by_prompt_length_times_entries(num_prompt_tokens, value):
    wire = types_pb2.SamplingParams(prompt_logprobs=value)
    limits = replace(LIMITS, max_model_len=2**20)
    taken = check_sampling(wire, num_prompt_tokens, limits, lambda: 1)
    assert taken.prompt_logprobs == value
    with pytest.raises(InvalidField, match="at most 262144") as caught:
        check_sampling(wire, num_prompt_tokens + 1, limits, lambda: 1)
    assert caught.value.field == "sampling.prompt_logprobs"


def test_defaults_are_filled_in():
    sampling = _sampling()
    assert sampling.temperature == 1.0
    assert (sampling.top_k, sampling.top_p, sampling.seed) == (0, 1.0, 42)
    assert sampling.logprobs is None
    assert sampling.skip_special_tokens
    assert not sampling.ignore_eos


@pytest.mark.parametrize(("num_prompt_tokens", "expected"), [(10, 54), (63, 1)])
def test_D3_absent_max_tokens_is_the_rest_of_the_context(num_prompt_tokens, expected):
    assert _sampling(num_prompt_tokens).max_tokens == expected


def test_D3_absent_max_tokens_is_256_in_a_long_context():
    limits = ModelLimits(
        served_name="tiny",
        vocab_size=100,
        max_model_len=8192,
        special_ids=frozenset(),
        max_token_characters=8,
    )
    assert check_sampling(types_pb2.SamplingParams(), 10, limits, lambda: 1).max_tokens == 256


@pytest.mark.parametrize("value", [55, 2**31, 2**63 - 1])
def test_D2_D3_prompt_plus_output_over_the_limit_is_too_long(value):
    with pytest.raises(TooLong, match="at most 54 behind a prompt of 10 tokens"):
        _sampling(max_tokens=value)


@pytest.mark.parametrize("stop", [[""], ["ok", ""], ["x" * 257]])
def test_D5_an_empty_or_huge_stop_is_refused_by_its_place(stop):
    with pytest.raises(InvalidField) as caught:
        _sampling(stop=stop)
    assert caught.value.field == f"sampling.stop[{len(stop) - 1}]"


def test_D5_too_many_stops_are_refused():
    with pytest.raises(InvalidField, match="at most 16 strings"):
        _sampling(stop=["x"] * 17)


@pytest.mark.parametrize("length", [1, 62, 63])
def test_D2_a_prompt_up_to_one_below_the_limit_is_taken(length):
    check_prompt_tokens("text", [5] * length, LIMITS)


@pytest.mark.parametrize("length", [64, 65, 640])
def test_D2_a_prompt_at_the_limit_is_too_long(length):
    with pytest.raises(TooLong, match="at most 63 tokens"):
        check_prompt_tokens("text", [5] * length, LIMITS)


@pytest.mark.parametrize("token_ids", [[], [0], [2]])
def test_D1_an_empty_prompt_is_refused(token_ids):
    with pytest.raises(InvalidField):
        check_prompt_tokens("text", token_ids, LIMITS)


def test_D1_special_tokens_beside_others_are_fine():
    check_prompt_tokens("token_ids", [1, 2], LIMITS)
    check_prompt_tokens("token_ids", [5], LIMITS)


def test_D5_a_text_that_cannot_fit_is_refused_before_it_is_tokenized():
    request = inference_pb2.GenerateRequest(text="x" * (64 * 8 + 1))
    with pytest.raises(TooLong):
        check_prompt_form(request, LIMITS)
    check_prompt_form(inference_pb2.GenerateRequest(text="x" * (64 * 8)), LIMITS)


@pytest.mark.parametrize("request_id", ["", "a", "A-b_c.9", "x" * 128])
def test_a_safe_request_id_is_taken(request_id):
    check_request_id(request_id)


@pytest.mark.parametrize("request_id", ["x" * 129, "a b", "a\n", "\x1b[31m", "é", "a/b"])
def test_E10_an_unsafe_request_id_is_refused(request_id):
    with pytest.raises(InvalidField) as caught:
        check_request_id(request_id)
    assert caught.value.field == "request_id"


def test_only_the_served_model_is_found():
    check_model("", LIMITS)
    check_model("tiny", LIMITS)
    with pytest.raises(ModelNotFound):
        check_model("Tiny", LIMITS)
