"""Profile files."""

import json
from pathlib import Path

import pytest

from pdserve.errors import ConfigError
from pdserve.predictor.profile import Profile, profile_from_json
from pdserve.predictor.profile_files import read_profiles

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
        ({"transfer": [0.002, float("nan")]}, "transfer"),
        ({"transfer": [0.002, float("inf")]}, "transfer"),
        ({"prefill": [10**400, 1, 1]}, "prefill"),
        ({"prefill": [1e9, 1, 1]}, "prefill"),
        ({"decode": [True, 1, 1]}, "decode"),
        ({"kv_tokens": True}, "kv_tokens"),
        ({"kv_tokens": 2**70}, "kv_tokens"),
        ({"num_gpus": -1}, "num_gpus"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_batched_tokens": "many"}, "max_num_batched_tokens"),
        ({"block_size": -16}, "block_size"),
        ({"detail": [1]}, "detail"),
        ({"detail": {"model": 3}}, "detail"),
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


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b'{"worker_class": "a"}\n{}\n', "no JSON object: line 2, column 1"),
        (b'{"a": ' + 100_000 * b"[", "no JSON object that can be read"),
        (b"\xff\xfe", "no text in UTF-8"),
        (b'{"prefill": [-1, 0, 0]}', "prefill must be 3 numbers from 0 to 3600"),
    ],
)
def test_a_file_that_is_no_profile_is_refused_by_its_name(
    tmp_path: Path, content: bytes, told: str
) -> None:
    path = tmp_path / "other.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"profile {path}.* {told}"):
        read_profiles([str(path)])


def test_a_file_that_is_not_there_is_refused_by_its_name() -> None:
    with pytest.raises(ConfigError, match=r"profile /nowhere\.json: No such file"):
        read_profiles(["/nowhere.json"])
