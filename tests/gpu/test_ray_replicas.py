"""Replicas of two GPUs as placement groups of a Ray cluster, one after the other."""

import importlib.util
from pathlib import Path

import pytest

from tests.support.gpus import needs_gpus
from tests.support.shape_clusters import Shape, run_shapes
from tests.support.tiny_models import make_tiny

pytestmark = [
    needs_gpus(2, "Ray gives each rank one of its own"),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray"),
]

ALONE = Shape(prefill=None, decode=(1, 1))
TENSOR = Shape(prefill=None, decode=(2, 1), on_ray=True)
STAGES = Shape(prefill=None, decode=(1, 2), on_ray=True)


def test_TOK_replicas_of_two_gpus_run_as_placement_groups_of_ray(tmp_path: Path) -> None:
    folder = make_tiny(
        tmp_path, "llama", hidden=256, heads=4, kv_heads=2, intermediate=512, max_position=2048
    )
    # Each takes both GPUs of a Ray cluster of its own.
    found = {
        **run_shapes(folder, "cuda", (TENSOR, ALONE), 2),
        **run_shapes(folder, "cuda", (STAGES,)),
    }
    for shape in (TENSOR, STAGES):
        assert not found[shape].error
        assert found[shape].tokens == found[ALONE].tokens
        assert found[shape].num_ranks == [2]
        assert found[shape].parents == ["ray::FaceActor"]
