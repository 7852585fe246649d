"""Replicas of several ranks, as real processes behind faces: the tokens of one GPU.

Pools share the GPUs: ranks of different replicas may be on the same one. Where
there is but one, all are on it: nothing between them needs NCCL.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.support.gpus import count_gpus, gpu_of
from tests.support.shape_clusters import (
    LONG_TOKENS,
    NUM_AT_ONCE,
    NUM_TOKENS,
    PROMPTS,
    TOKENS_BEFORE_KILL,
    Outcome,
    Shape,
    run_shapes,
)
from tests.support.tiny_models import make_tiny

pytestmark = pytest.mark.timeout(600)
"""The first test starts all clusters."""

make_shape = partial(
    Shape, visible_gpus=None if count_gpus() > 1 else ",".join(gpu_of(rank) for rank in range(2))
)
"""Of replicas of two ranks at most, each on a GPU of its own, or both on the only one."""
CLUSTER_BYTES = 40 << 30
"""Of an only GPU, for each cluster at once. Its ranks take far less, but do not load in turn, and
what others allocate while one measures a graph is counted for each of its graphs."""
ONE, TENSOR, STAGES = (1, 1), (2, 1), (1, 2)
ALONE = make_shape(prefill=None, decode=ONE)
ALONE_BF16 = make_shape(prefill=None, decode=ONE, dtype="bfloat16")
TENSOR_BF16 = make_shape(prefill=None, decode=TENSOR, dtype="bfloat16")
"""Sums of two halves round otherwise than one GPU's: the tokens of this shape are its own."""
KILLED_TENSOR = make_shape(prefill=TENSOR, decode=TENSOR, kills="decode")
KILLED_STAGES = make_shape(prefill=STAGES, decode=STAGES, kills="decode")
KILLED_PREFILL = make_shape(prefill=TENSOR, decode=ONE, kills="prefill")
REFERENCES: Mapping[Shape, Shape] = {
    KILLED_TENSOR: ALONE,
    KILLED_STAGES: ALONE,
    KILLED_PREFILL: ALONE,
    make_shape(prefill=ONE, decode=TENSOR): ALONE,
    make_shape(prefill=ONE, decode=ONE): ALONE,
    make_shape(prefill=STAGES, decode=TENSOR): ALONE,
    make_shape(prefill=ONE, decode=ONE, dtype="bfloat16"): ALONE_BF16,
    make_shape(prefill=STAGES, decode=STAGES, dtype="bfloat16"): ALONE_BF16,
    make_shape(prefill=TENSOR, decode=TENSOR, dtype="bfloat16"): TENSOR_BF16,
}
"""Which colocated shape's tokens each split one must give."""
SHARED_GPUS = Shape(
    prefill=None, decode=(2, 2), visible_gpus=",".join(gpu_of(rank % 2) for rank in range(4))
)
"""Four ranks of one replica on two GPUs, two on each, or on one."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny256")
    return make_tiny(
        path, "llama", hidden=256, heads=4, kv_heads=2, intermediate=512, max_position=2048
    )


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> Mapping[Shape, Outcome]:
    """Those that others are held against come first, and compile the kernels of all."""
    shapes = (ALONE, ALONE_BF16, TENSOR_BF16, *REFERENCES)
    return run_shapes(folder, "cuda", shapes, count_at_once())


@pytest.mark.parametrize("shape", REFERENCES, ids=str)
def test_TOK_A15_kv_of_one_shape_decodes_in_another_as_on_one_gpu(
    outcomes: Mapping[Shape, Outcome], shape: Shape
) -> None:
    expected, found = outcomes[REFERENCES[shape]], outcomes[shape]
    assert not expected.error
    assert not found.error
    assert found.tokens == expected.tokens
    assert [len(ids) for ids in found.tokens] == [NUM_TOKENS] * len(PROMPTS)
    assert found.num_handed_off == len(PROMPTS)
    assert found.num_recomputed == 0
    assert found.num_ranks == [num_ranks_of(pool) for pool in pools_of(shape)]


@pytest.mark.parametrize("shape", [KILLED_TENSOR, KILLED_STAGES, KILLED_PREFILL], ids=str)
def test_TOK_B9_the_kill_of_one_rank_ends_its_replica_and_costs_no_token(
    outcomes: Mapping[Shape, Outcome], shape: Shape
) -> None:
    expected, found = outcomes[ALONE], outcomes[shape]
    assert not found.error
    assert found.cut is not None
    assert list(found.cut.token_ids) == expected.long
    assert len(expected.long) == LONG_TOKENS > TOKENS_BEFORE_KILL
    assert found.cut.timeline is not None
    assert found.cut.timeline.attempts == (2 if shape.kills == "decode" else 1)
    killed, back = found.killed, found.back
    assert killed is not None
    assert back is not None
    assert back.incarnation != killed.incarnation
    assert not set(back.rank_pids) & set(killed.rank_pids), "all ranks of a replica die as one"
    assert found.again == expected.tokens


def test_TOK_four_ranks_of_one_replica_on_shared_gpus_give_one_gpus_tokens(
    outcomes: Mapping[Shape, Outcome], folder: Path
) -> None:
    found = run_shapes(folder, "cuda", (SHARED_GPUS,))[SHARED_GPUS]
    assert not found.error
    assert found.num_ranks == [4]
    assert found.tokens == outcomes[ALONE].tokens


def count_at_once() -> int:
    """Counts the clusters that fit side by side."""
    if count_gpus() > 1:
        return NUM_AT_ONCE
    return max(1, torch.cuda.mem_get_info()[1] // CLUSTER_BYTES)


def pools_of(shape: Shape) -> list[tuple[int, int]]:
    """Of each replica, in the order in which they are started."""
    assert shape.prefill is not None
    return [shape.prefill, *[shape.decode] * (2 if shape.kills else 1)]


def num_ranks_of(pool: tuple[int, int]) -> int:
    return pool[0] * pool[1]
