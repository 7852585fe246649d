from pathlib import Path

import pytest

from loadtests.sessions import Sizes
from loadtests.traces import fit_prompt
from simulation.traces import read_trace
from simulation.workload import Arrival

SIZES = Sizes(vocab_size=1000, max_prompt_tokens=2048, output_tokens=8)
MOONCAKE = """\
{"timestamp": 2000, "input_length": 1100, "output_length": 500, "hash_ids": [0, 1, 2]}
{"timestamp": 2500, "input_length": 700, "output_length": 0, "hash_ids": [0, 9]}
"""


def read(folder: Path, text: str = MOONCAKE) -> tuple[Arrival, ...]:
    path = folder / "trace"
    path.write_text(text)
    return read_trace(path).arrivals


@pytest.mark.parametrize("scale", [1.0, 0.25, 0.01])
def test_prompts_share_as_much_as_their_scaled_blocks(tmp_path: Path, scale: float) -> None:
    prompts = [fit_prompt(request, SIZES, scale) for request in read(tmp_path)]
    assert [len(prompt) for prompt in prompts] == [round(1100 * scale), round(700 * scale)]
    num_shared = 0
    for a, b in zip(*prompts, strict=False):
        if a != b:
            break
        num_shared += 1
    assert num_shared == pytest.approx(512 * scale, abs=2)


def test_a_prompt_that_is_too_long_is_cut_and_keeps_its_beginning(tmp_path: Path) -> None:
    first, _ = read(tmp_path)
    small = Sizes(vocab_size=1000, max_prompt_tokens=600, output_tokens=8)
    assert fit_prompt(first, small, 1.0) == fit_prompt(first, SIZES, 1.0)[:600]


def test_a_request_with_fewer_blocks_than_tokens_still_has_its_length(tmp_path: Path) -> None:
    line = '{"timestamp": 0, "input_length": 900, "output_length": 1, "hash_ids": [4]}'
    (request,) = read(tmp_path, line)
    assert len(fit_prompt(request, SIZES, 1.0)) == 900


def test_the_shortest_prompt_has_a_token(tmp_path: Path) -> None:
    _, second = read(tmp_path)
    assert len(fit_prompt(second, SIZES, 0.0001)) == 1
