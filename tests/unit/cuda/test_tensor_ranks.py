"""Tensor ranks as processes, kernels in Triton's interpreter, rings in files, against one CPU."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pdserve.config.engine import EngineConfig
from pdserve.cuda.device import Device
from pdserve.cuda.tensor_ranks import TensorRanks
from pdserve.errors import WorkerLost
from pdserve.kernels.peer_ring import EMPTY_WORD, NUM_STATE_WORDS, PeerRing
from pdserve.models.registry import load_model
from pdserve.request import SamplingParams
from tests.support import generation
from tests.support.device_ranks import device_ranks
from tests.support.random_load import make_arrivals, play
from tests.support.tiny_models import make_tiny

PROMPT = tuple(range(40, 61))
BLOCKS = (3, 1)


def settings(folder: Path, tensor_parallel: int) -> EngineConfig:
    return EngineConfig(
        model=str(folder),
        max_model_len=64,
        max_num_seqs=3,
        max_num_batched_tokens=48,
        tensor_parallel=tensor_parallel,
    )


@pytest.mark.parametrize(
    ("family", "over", "num_ranks"),
    [
        ("llama", {"is_tied": True, "attention_bias": True, "mlp_bias": True}, 2),
        pytest.param(
            "qwen3", {"head_dim": 32, "heads": 4, "kv_heads": 2}, 4, marks=pytest.mark.soak
        ),
    ],
)
def test_ranks_give_the_cpus_tokens(
    tmp_path: Path, family: str, over: dict[str, object], num_ranks: int
) -> None:
    folder = make_tiny(tmp_path / "model", family, **over)
    engine = settings(folder, num_ranks)
    whole = replace(engine, tensor_parallel=1)
    theirs = generation.make_runner(load_model(folder, whole), whole, 8)
    request = generation.make_request(PROMPT)
    expected = generation.generate(theirs, request, 3, BLOCKS, chunk_tokens=16)
    with device_ranks(engine, tmp_path / "meeting", 8) as (runner, _):
        made = generation.generate(runner, request, 3, BLOCKS, chunk_tokens=16)
    assert made == expected


@pytest.mark.soak
def test_random_load_with_two_steps_in_flight_gives_the_cpus_tokens(
    tiny_llama_folder: Path, tmp_path: Path
) -> None:
    params = (
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.9),
        SamplingParams(temperature=0.0, frequency_penalty=1.0),
        SamplingParams(temperature=0.9, top_k=9, logprobs=0),
    )
    arrivals = make_arrivals(
        2, 5, 384, max_prompt=20, max_tokens=3, params=params, cancel_rate=0.2, turns=3
    )
    engine = settings(tiny_llama_folder, 2)
    whole = replace(engine, tensor_parallel=1)
    theirs = generation.make_runner(load_model(tiny_llama_folder, whole), whole, 8)
    expected = play(whole, 5, theirs, arrivals)
    with device_ranks(engine, tmp_path / "meeting", 8) as (runner, _):
        assert play(engine, 5, runner, arrivals) == expected


def make_fake_ranks(num_words: int) -> tuple[TensorRanks, list[torch.Tensor]]:
    """Rank 0 of two, and both rings; the other sends what a test puts there."""
    rings = [torch.full((3, 1, num_words), EMPTY_WORD.value, dtype=torch.int32) for _ in range(2)]
    ring = PeerRing(
        rank=0,
        rings=tuple(rings),
        halves=tuple(one.view(torch.int16) for one in rings),
        state=torch.zeros(NUM_STATE_WORDS, dtype=torch.int32),
        max_programs=3,
        max_polls=2,
    )
    return TensorRanks(ring, Device(torch.device("cpu")), ()), rings


def test_a_step_larger_than_a_slot_is_summed_in_pieces() -> None:
    ranks, rings = make_fake_ranks(2 * 16)
    numbers = torch.Generator().manual_seed(7)
    own, others, residual = (
        torch.randn(shape, generator=numbers) for shape in ((2, 5, 16), (5, 16), (5, 16))
    )
    out = torch.empty(5, 16)
    wanted = residual + (own.sum(0) + others)
    for slot, start in enumerate(range(0, 5, 2)):
        words = others[start : start + 2].flatten().view(torch.int32)
        rings[0][slot, 0, : words.numel()] = words
    ranks.add_norm(own, residual, torch.ones(16), out, epsilon=1e-6)
    torch.testing.assert_close(residual, wanted)
    torch.testing.assert_close(out, wanted * wanted.square().mean(1, keepdim=True).rsqrt())
    ranks.watch().check()


def test_B9_a_rank_that_was_missed_is_told_with_the_step() -> None:
    ranks, _ = make_fake_ranks(16)
    before = ranks.watch()
    x = torch.randn(1, 1, 16, generator=torch.Generator().manual_seed(8))
    ranks.add_norm(x, x[0].clone(), torch.ones(16), x[0].clone(), epsilon=1e-6)
    before.check()
    with pytest.raises(WorkerLost, match="did not send its part"):
        ranks.watch().check()
