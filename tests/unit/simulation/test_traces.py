import gzip
import json
import math
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


def mooncake(**change: object) -> str:
    row = {"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}
    return json.dumps(row) + "\n\n" + json.dumps(row | change) + "\n"


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,1,1\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (mooncake(timestamp=math.nan), "timestamp must be a number from .* got NaN"),
        (mooncake(timestamp=math.inf), "timestamp must be a number from .* got Infinity"),
        (mooncake().replace(": 0", ": 1e400"), "timestamp must be a number .* got Infinity"),
        (mooncake(timestamp=10**400), "timestamp must be a number"),
        (mooncake(timestamp=True), "timestamp must be a number .* got true"),
        (mooncake(timestamp="soon"), "timestamp must be a number .* got 'soon'"),
        (mooncake(input_length=True), "input_length must be a whole number .* got true"),
        (mooncake(input_length=1.5), "input_length must be a whole number .* got 1.5"),
        (mooncake(input_length=2**31), "input_length must be a whole number from 1 to"),
        (mooncake(output_length=-1), "output_length must be a whole number from 0 .* got -1"),
        (mooncake(hash_ids=[1, None]), "each of hash_ids must be a whole number .* got null"),
        (mooncake(hash_ids={}), "hash_ids must be a list"),
        (mooncake(hash_ids=[]), "hash_ids must be a list of at least one"),
        (mooncake() + "[1]\n", "it must be one JSON object, got a list"),
        (mooncake() + "{no}\n", "it must be one JSON object, got '{no}'"),
        ('[{"timestamp": 0}]\n', "it must be a JSON object .* or have the columns TIMESTAMP"),
        ("time,tokens\n1,2\n", "it must be .* the columns TIMESTAMP.* got 'time,tokens'"),
        ("garbage", "it must be .* got 'garbage'"),
        (AZURE + "2023-11-16 18:15:46,1\n", "GeneratedTokens is missing"),
        (AZURE + "2023-11-16 18:15:46,True,1\n", "ContextTokens must be .* got 'True'"),
        (AZURE + "2023-11-16 18:15:46,1,-1\n", "GeneratedTokens must be .* got -1"),
        (AZURE + "2023-11-16 18:15:46.5e9,1,1\n", "TIMESTAMP must be a time like"),
        (AZURE + "nan,1,1\n", "TIMESTAMP must be a time like .* got 'nan'"),
        (AZURE + '"' + 200_000 * "x" + "\n", "it must be a line of CSV"),
    ],
)
def test_a_line_that_cannot_be_is_refused_by_number_field_and_value(
    tmp_path: Path, text: str, told: str
):
    path = tmp_path / "broken"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"^trace \S*broken, line \d+: {told}") as raised:
        read_trace(path)
    assert "base 10" not in str(raised.value)
    assert len(str(raised.value)) < len(str(path)) + 220


def test_lines_are_counted_as_an_editor_does(tmp_path: Path):
    path = tmp_path / "t"
    path.write_text("\n" + mooncake(timestamp=math.nan), encoding="utf-8")
    with pytest.raises(ConfigError, match="line 4: timestamp"):
        read_trace(path)


def test_json_that_is_nested_without_end_is_refused(tmp_path: Path):
    path = tmp_path / "deep"
    path.write_text('{"timestamp": ' + 100_000 * "[", encoding="utf-8")
    with pytest.raises(ConfigError, match="line 1: it must be one JSON object"):
        read_trace(path)


def test_gzip_is_known_by_its_content_not_by_its_name(tmp_path: Path):
    zipped, plain = tmp_path / "zipped.jsonl", tmp_path / "plain.jsonl.gz"
    zipped.write_bytes(gzip.compress(mooncake(timestamp=5).encode()))
    plain.write_text(mooncake(timestamp=5), encoding="utf-8")
    for path in (zipped, plain):
        assert [one.at_s for one in read_trace(path).arrivals] == [0.0, 0.005]


def test_a_mark_of_the_byte_order_is_passed_over(tmp_path: Path):
    path = tmp_path / "azure.csv"
    path.write_text(AZURE, encoding="utf-8-sig")
    assert len(read_trace(path).arrivals) == 1


def test_bytes_that_are_no_text_are_refused_without_words_of_a_codec(tmp_path: Path):
    path = tmp_path / "noise"
    path.write_bytes(b"\x8b\xff\xfe\n")
    with pytest.raises(ConfigError, match="line 1: it is no text in UTF-8"):
        read_trace(path)


def test_a_line_without_an_end_is_not_read_into_memory():
    with pytest.raises(ConfigError, match="line 1: it is longer than 16777216 bytes"):
        read_trace(Path("/dev/zero"))


def test_broken_gzip_data_is_refused_as_such(tmp_path: Path):
    path = tmp_path / "broken"
    whole = gzip.compress("".join(mooncake(timestamp=number) for number in range(99)).encode())
    cut_off, no_deflate, wrong_sum = (
        whole[:-40],
        whole[:12] + 20 * b"\xff",
        whole[:-8] + b"12345678",
    )
    for data in (cut_off, no_deflate, wrong_sum):
        path.write_bytes(data)
        with pytest.raises(ConfigError, match=r"broken cannot be read: its gzip data is damaged"):
            read_trace(path)


def test_a_missing_or_damaged_file_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="nowhere"):
        read_trace(tmp_path / "nowhere.jsonl")
    damaged = tmp_path / "damaged.jsonl.gz"
    damaged.write_bytes(gzip.compress(b'{"timestamp": 0}\n' * 99)[:30])
    with pytest.raises(ConfigError, match="damaged"):
        read_trace(damaged)
