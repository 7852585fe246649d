"""Pipeline stages as processes, kernels in Triton's interpreter, memory in files, against a CPU."""

from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.config.engine import EngineConfig
from pdserve.engine.batch import PendingStep, StepPlan
from pdserve.models.registry import load_model
from pdserve.rank.step_results import ExpectedStep, ResultReceiver
from pdserve.request import SamplingParams
from tests.support import generation
from tests.support.device_ranks import device_ranks
from tests.support.random_load import make_arrivals, play
from tests.support.tiny_models import make_tiny

PROMPT = tuple(range(40, 61))
BLOCKS = (3, 1)


class CountedResults:
    """Counts the steps whose results are expected."""

    def __init__(self, receiver: ResultReceiver) -> None:
        self._receiver = receiver
        self.num_expected = 0

    def expect(self) -> ExpectedStep:
        self.num_expected += 1
        return self._receiver.expect()

    def put(self, step: PendingStep) -> None:
        self._receiver.put(step)


def settings(folder: Path, stages: int) -> EngineConfig:
    return EngineConfig(
        model=str(folder),
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=48,
        pipeline_parallel=stages,
    )


@pytest.mark.parametrize(
    ("family", "over", "stages"),
    [
        pytest.param(
            "llama",
            {"is_tied": True, "attention_bias": True, "mlp_bias": True},
            2,
            marks=pytest.mark.soak,
        ),
        ("smollm3", {"num_layers": 3}, 3),
    ],
)
def test_stages_give_the_cpus_tokens(
    tmp_path: Path, family: str, over: dict[str, object], stages: int
) -> None:
    folder = make_tiny(tmp_path / "model", family, **over)
    engine = settings(folder, stages)
    whole = replace(engine, pipeline_parallel=1)
    theirs = generation.make_runner(load_model(folder, whole), whole, 8)
    request = generation.make_request(PROMPT)
    expected = generation.generate(theirs, request, 3, BLOCKS, chunk_tokens=16)
    with device_ranks(engine, tmp_path / "meeting", 8) as (runner, _):
        made = generation.generate(runner, request, 3, BLOCKS, chunk_tokens=16)
    assert made == expected


def test_stages_joined_by_wires_give_the_cpus_tokens(
    tiny_llama_folder: Path, tmp_path: Path
) -> None:
    engine = settings(tiny_llama_folder, 2)
    whole = replace(engine, pipeline_parallel=1)
    theirs = generation.make_runner(load_model(tiny_llama_folder, whole), whole, 8)
    request = generation.make_request(PROMPT)
    expected = generation.generate(theirs, request, 2, BLOCKS)
    with device_ranks(engine, tmp_path / "meeting", 8, "cpu+far") as (runner, children):
        results = CountedResults(children.followers.results)
        expected_when_told: list[int] = []

        def announce(plan: StepPlan) -> None:
            expected_when_told.append(results.num_expected)
            children.followers.announce(plan)

        runner.results, runner.announce = results, announce
        made = generation.generate(runner, request, 2, BLOCKS)
    assert made == expected
    # The last stage may answer as soon as it was told, before this one is through with the launch.
    assert expected_when_told == [1, 2]


@pytest.mark.soak
def test_stages_of_two_ranks_each_give_the_cpus_tokens(tmp_path: Path) -> None:
    folder = make_tiny(
        tmp_path / "model",
        "llama",
        heads=4,
        kv_heads=2,
        is_tied=True,
        attention_bias=True,
        mlp_bias=True,
    )
    engine = replace(settings(folder, 2), tensor_parallel=2)
    whole = replace(engine, pipeline_parallel=1, tensor_parallel=1)
    theirs = generation.make_runner(load_model(folder, whole), whole, 8)
    request = generation.make_request(PROMPT)
    expected = generation.generate(theirs, request, 3, BLOCKS, chunk_tokens=16)
    with device_ranks(engine, tmp_path / "meeting", 8) as (runner, _):
        made = generation.generate(runner, request, 3, BLOCKS, chunk_tokens=16)
    assert made == expected


@pytest.mark.soak
def test_random_load_with_steps_in_all_stages_gives_the_cpus_tokens(
    tiny_llama_folder: Path, tmp_path: Path
) -> None:
    params = (
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.9),
        SamplingParams(temperature=0.0, frequency_penalty=1.0),
        SamplingParams(temperature=0.9, top_k=9, logprobs=0),
        SamplingParams(temperature=0.0, prompt_logprobs=1),
    )
    arrivals = make_arrivals(
        2, 7, 384, max_prompt=20, max_tokens=5, params=params, cancel_rate=0.2, turns=3
    )
    engine = settings(tiny_llama_folder, 2)
    whole = replace(engine, pipeline_parallel=1)
    theirs = generation.make_runner(load_model(tiny_llama_folder, whole), whole, 8)
    expected = play(whole, 7, theirs, arrivals)
    with device_ranks(engine, tmp_path / "meeting", 8) as (runner, _):
        assert runner.max_steps_in_flight == 4
        assert play(engine, 7, runner, arrivals) == expected
