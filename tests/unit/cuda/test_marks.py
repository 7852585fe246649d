from pathlib import Path

import pytest
import torch

from pdserve.cache.kv_tensors import KvTensors
from pdserve.config.engine import EngineConfig
from pdserve.cuda.marks import LayerMarks
from pdserve.cuda.runner import CudaRunner
from pdserve.engine.batch import SequenceSlice, StepPlan
from pdserve.request import BlockId
from tests.support.cuda_engine import make_cuda_runner
from tests.support.engine_requests import make_request


class Mark:
    """Takes down what KV memory holds where it stands."""

    def __init__(self, kv: KvTensors | None = None) -> None:
        layers = range(0) if kv is None else range(len(kv.part.layers))
        self.nan_layers = [
            layer
            for layer in layers
            if kv is not None and any(half[:5].isnan().any() for half in kv.layer(layer))
        ]

    def is_reached(self) -> bool:
        return True


def test_marks_stand_behind_whole_groups_and_the_last_layer() -> None:
    made: list[Mark] = []

    def make() -> Mark:
        made.append(Mark())
        return made[-1]

    marks = LayerMarks(make, range(16, 30), 4, max_steps=2)
    marks.begin(9)
    for end_layer in range(17, 31):
        marks.note_stored(end_layer)
    assert len(made) == 4
    found = [marks.find(9, end) for end in (17, 20, 21, 28, 29, 30)]
    assert found == [made[0], made[0], made[1], made[2], made[3], made[3]]


def test_steps_are_forgotten_once_they_have_ended_for_sure() -> None:
    marks = LayerMarks(Mark, range(2), 1, max_steps=2)
    for step in (4, 5, 6, 7):
        marks.begin(step)
        marks.note_all_stored()
    assert marks.newest == 7
    assert marks.find(4, 1) is None
    assert all(marks.find(step, 1) is not None for step in (5, 6, 7))
    with pytest.raises(AssertionError, match="not launched"):
        marks.find(8, 1)


@pytest.fixture
def runner(tiny_llama_folder: Path) -> CudaRunner:
    engine = EngineConfig(
        model=str(tiny_llama_folder), max_model_len=64, max_num_seqs=2, max_num_batched_tokens=32
    )
    made = make_cuda_runner(tiny_llama_folder, engine, 4)
    made.marks = LayerMarks(lambda: Mark(made.kv), made.kv.part.layers, 1, max_steps=2)
    return made


def test_kv_of_a_layer_is_there_at_its_mark_and_that_of_the_next_is_not(
    runner: CudaRunner,
) -> None:
    for layer in (0, 1):
        for half in runner.kv.layer(layer):
            half.fill_(torch.nan)
    part = SequenceSlice(
        request=make_request("r", tuple(range(5, 10))),
        start=0,
        token_ids=tuple(range(5, 10)),
        block_ids=(BlockId(0), BlockId(1)),
        output_index=None,
    )
    runner.run(StepPlan(slices=(part,)))
    assert runner.marks is not None
    step = runner.marks.newest
    first, second = runner.marks.find(step, 1), runner.marks.find(step, 2)
    assert isinstance(first, Mark)
    assert isinstance(second, Mark)
    assert (first.nan_layers, second.nan_layers) == ([1], [])
