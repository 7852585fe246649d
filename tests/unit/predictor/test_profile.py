"""Profile files."""

import json

import pytest

from pdserve.errors import ConfigError
from pdserve.predictor.profile import Profile, profile_from_json

PROFILE = Profile(
    worker_class="cpu/smollm2",
    prefill=(0.01, 1e-3, 1e-7),
    decode=(0.02, 1e-3, 1e-6),
    transfer=(0.001, 1e-9),
    kv_bytes_per_token=46080,
    kv_tokens=20_000,
    num_gpus=0,
    detail={"device": "cpu"},
)


def test_a_profile_survives_its_file() -> None:
    assert profile_from_json(PROFILE.to_json()) == PROFILE


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"prefill": [1, 2]}, "prefill"),
        ({"decode": [0, 0, 0]}, "decode"),
        ({"transfer": [-1, 1]}, "transfer"),
        ({"prefill": ["a", 1, 1]}, "prefill"),
        ({"kv_tokens": 0}, "kv_tokens"),
        ({"kv_bytes_per_token": None}, "kv_bytes_per_token"),
        ({"worker_class": 3}, "worker_class"),
        ({"colour": 1}, "colour"),
    ],
)
def test_a_wrong_field_is_refused_by_its_name(change: dict[str, object], named: str) -> None:
    data = json.loads(PROFILE.to_json()) | change
    with pytest.raises(ConfigError, match=named):
        profile_from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["", "[]", "{", "3"])
def test_what_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="profile"):
        profile_from_json(text)
