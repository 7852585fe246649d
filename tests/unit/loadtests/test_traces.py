import gzip
from pathlib import Path

import pytest

from loadtests.sessions import Sizes
from loadtests.traces import TraceError, fit_prompt, read_trace

SIZES = Sizes(vocab_size=1000, max_prompt_tokens=2048, output_tokens=8)
MOONCAKE = """\
{"timestamp": 2000, "input_length": 1100, "output_length": 500, "hash_ids": [0, 1, 2]}
{"timestamp": 2500, "input_length": 700, "output_length": 0, "hash_ids": [0, 9]}

"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text)
    return path


def test_mooncakes_requests_come_at_their_times_with_their_blocks(tmp_path: Path) -> None:
    first, second = read_trace(write(tmp_path, MOONCAKE))
    assert (first.at_s, first.prompt_tokens, first.output_tokens) == (0.0, 1100, 500)
    assert (second.at_s, second.prompt_tokens, second.output_tokens) == (0.5, 700, 1)
    assert first.blocks[0] == second.blocks[0]
    assert not set(first.blocks[1:]) & set(second.blocks[1:])


def test_azures_requests_come_at_their_times_and_share_nothing(tmp_path: Path) -> None:
    first, second = read_trace(write(tmp_path, AZURE))
    assert (first.at_s, first.prompt_tokens, first.output_tokens) == (0.0, 374, 44)
    assert second.at_s == pytest.approx(4.314579, abs=1e-6)
    assert not set(first.blocks) & set(second.blocks)


def test_a_gzipped_trace_reads_the_same(tmp_path: Path) -> None:
    packed = tmp_path / "trace.jsonl.gz"
    packed.write_bytes(gzip.compress(MOONCAKE.encode()))
    assert list(read_trace(packed)) == list(read_trace(write(tmp_path, MOONCAKE)))


@pytest.mark.parametrize("scale", [1.0, 0.25, 0.01])
def test_prompts_share_as_much_as_their_scaled_blocks(tmp_path: Path, scale: float) -> None:
    first, second = read_trace(write(tmp_path, MOONCAKE))
    prompts = [fit_prompt(request, SIZES, scale) for request in (first, second)]
    assert [len(prompt) for prompt in prompts] == [round(1100 * scale), round(700 * scale)]
    num_shared = 0
    for a, b in zip(*prompts, strict=False):
        if a != b:
            break
        num_shared += 1
    assert num_shared == pytest.approx(512 * scale, abs=2)


def test_a_prompt_that_is_too_long_is_cut_and_keeps_its_beginning(tmp_path: Path) -> None:
    first, _ = read_trace(write(tmp_path, MOONCAKE))
    small = Sizes(vocab_size=1000, max_prompt_tokens=600, output_tokens=8)
    assert fit_prompt(first, small, 1.0) == fit_prompt(first, SIZES, 1.0)[:600]


def test_a_request_with_fewer_blocks_than_tokens_still_has_its_length(tmp_path: Path) -> None:
    (request,) = read_trace(
        write(
            tmp_path,
            '{"timestamp": 0, "input_length": 900, "output_length": 1, "hash_ids": [4]}',
        )
    )
    assert len(fit_prompt(request, SIZES, 1.0)) == 900


@pytest.mark.parametrize(
    "text",
    [
        '{"timestamp": 0}',
        '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": []}',
        "{broken",
        "a,b\n1,2\n",
        "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n",
    ],
)
def test_a_line_of_another_format_is_an_error_that_says_where(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(TraceError, match="trace, request 1"):
        list(read_trace(path))


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        list(read_trace(tmp_path / "nowhere"))
