import gzip
import json
from pathlib import Path

import pytest

from pdserve.errors import ConfigError
from simulation.traces import read_trace
from simulation.workload import Piece

ROWS = [
    {"timestamp": 1500, "input_length": 1100, "output_length": 7, "hash_ids": [4, 5, 6]},
    {"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [4, 9]},
]


def write_mooncake(path: Path, rows: list[dict[str, object]]) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt", encoding="utf-8") as file:
        file.write(text)
    return path


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_mooncake_ids_become_pieces_of_512_tokens(tmp_path: Path, name: str):
    workload = read_trace(write_mooncake(tmp_path / name, ROWS))
    early, late = workload.arrivals
    assert (early.at_s, late.at_s) == (0.0, 1.5)
    assert late.pieces == (Piece(4, 512), Piece(5, 512), Piece(6, 76))
    assert early.pieces == (Piece(4, 512), Piece(9, 88))
    assert (late.num_prompt_tokens, late.num_output_tokens) == (1100, 7)
    assert workload.name == "trace"


def test_a_mooncake_prompt_longer_than_its_ids_goes_on_as_the_last(tmp_path: Path):
    rows = [{"timestamp": 0, "input_length": 700, "output_length": 3, "hash_ids": [4]}]
    workload = read_trace(write_mooncake(tmp_path / "t.jsonl", rows))
    assert workload.arrivals[0].pieces == (Piece(4, 700),)


def test_azure_rows_share_nothing(tmp_path: Path):
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n",
        encoding="utf-8",
    )
    first, second = read_trace(path).arrivals
    assert first.at_s == 0.0
    assert second.at_s == pytest.approx(4.314579)
    assert first.pieces[0].num_tokens == 374
    assert first.pieces[0].content != second.pieces[0].content
    assert second.num_output_tokens == 109


def test_azure_times_of_2024_have_a_zone(tmp_path: Path):
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-05-10 00:00:00.009930+00:00,10,4\n2024-05-10 00:00:01.009930+00:00,10,4\n",
        encoding="utf-8",
    )
    assert read_trace(path).arrivals[1].at_s == pytest.approx(1.0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hello\nworld\n",
        '{"timestamp": 0}\n',
        '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": []}\n',
        '{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": [1]}\n',
        '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [-1]}\n',
        '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": 3}\n',
        "TIMESTAMP,ContextTokens,GeneratedTokens\n",
        "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,0,1\n",
    ],
)
def test_what_is_no_trace_is_refused_by_name(tmp_path: Path, text: str):
    path = tmp_path / "broken.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="broken"):
        read_trace(path)


def test_a_missing_or_damaged_file_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="nowhere"):
        read_trace(tmp_path / "nowhere.jsonl")
    damaged = tmp_path / "damaged.jsonl.gz"
    damaged.write_bytes(gzip.compress(b'{"timestamp": 0}\n' * 99)[:30])
    with pytest.raises(ConfigError, match="damaged"):
        read_trace(damaged)
