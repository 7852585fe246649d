from dataclasses import replace

import pytest

from pdserve.request import Role
from router.mismatch import find_mismatch
from tests.support.records import make_record

SHOWN = (
    "num_layers=2 num_kv_heads=4 head_dim=8 block_size=16 dtype=float32 "
    "tensor_parallel=1 pipeline_parallel=1 model_revision=abc"
)
RECORD = make_record("p", Role.PREFILL, compatibility_digest=b"x", geometry=SHOWN)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("num_layers=2", "num_layers=3"), "num_layers 2 and 3"),
        (("head_dim=8", "head_dim=16"), "head_dim 8 and 16"),
        (("model_revision=abc", "model_revision=def"), "model_revision abc and def"),
        (("", ""), "layout or wire_version"),
    ],
)
def test_A17_the_field_that_differs_is_named(change: tuple[str, str], expected: str) -> None:
    other = replace(RECORD, compatibility_digest=b"y", geometry=SHOWN.replace(*change))
    assert find_mismatch(RECORD, other) == expected


def test_A15_workers_of_other_shapes_go_together() -> None:
    other = replace(RECORD, geometry=SHOWN.replace("tensor_parallel=1", "tensor_parallel=2"))
    assert find_mismatch(RECORD, other) is None
