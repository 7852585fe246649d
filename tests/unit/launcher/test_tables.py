import io

import pytest
from rich.console import Console

from launcher.commands.explain import show
from launcher.commands.scale import COLUMNS as SCALE_COLUMNS
from launcher.commands.scale import pools_table
from launcher.tables import make_table, open_console
from pdserve.rpc.v1 import control_pb2, inference_pb2
from simulation.page import COLUMNS as PLAN_COLUMNS

NAME = "llama-3-8b h200 bfloat16 tp1"
NUMBERS = ("112 : 108", "220", "1.25 x", "97.3%", "31.30", "0.719", "14.642", "20.1", "35.2")
PLAN_ROW = (NAME, *NUMBERS, "24%", "1234")


def draw(table: object, width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(table)
    return out.getvalue()


def is_whole(text: str, drawn: str) -> bool:
    """Says whether a text stands there, in one line or folded."""
    rest = text.replace(" ", "")
    for line in drawn.splitlines():
        for end in range(len(rest), 0, -1):
            if rest[:end] in line.replace(" ", ""):
                rest = rest[end:]
                break
    return not rest


@pytest.mark.parametrize("width", [80, 120, 160])
def test_a_plan_fits_and_nothing_of_it_is_cut(width: int) -> None:
    drawn = draw(make_table(PLAN_COLUMNS, [PLAN_ROW, PLAN_ROW]), width)
    assert "…" not in drawn
    assert max(map(len, drawn.splitlines())) <= width
    assert is_whole(NAME, drawn)
    for number in ("97.3%", "31.30", "0.719", "14.642", "1234"):
        assert drawn.count(number) == 2
    assert (NAME in drawn) == (width >= 120)


@pytest.mark.parametrize("width", [80, 120])
def test_pools_and_their_needs_fit(width: int) -> None:
    pool = control_pb2.PoolStatus(
        role="prefill",
        range=control_pb2.PoolRange(least=1, most=16),
        num_serving=12,
        backlog_tokens=123456,
        oldest_s=12.5,
        num_sequences=1024,
        kv_share=1.0,
        tpot_s=0.123,
    )
    drawn = draw(pools_table(control_pb2.GetScalingResponse(pools=[pool])), width)
    assert max(map(len, drawn.splitlines())) <= width
    for text in ("prefill", "1..16", "123456", "12.5 s", "1024", "100%", "123 ms"):
        assert text in drawn
    for word in " ".join(SCALE_COLUMNS).split():
        assert word in drawn


@pytest.mark.parametrize("width", [80, 120])
def test_what_a_choice_cost_fits(width: int) -> None:
    one = inference_pb2.Candidate(
        prefill_worker="prefill-10", decode_worker="decode-11", cost=0.01234, first_token=0.5678
    )
    placed = inference_pb2.Placement(attempt=1, path="handoff", unit="seconds", candidates=[one])
    out = io.StringIO()
    show(inference_pb2.ExplainResponse(placements=[placed]), Console(file=out, width=width))
    drawn = out.getvalue()
    assert max(map(len, drawn.splitlines())) <= width
    assert "0.01234" in drawn
    assert "0.5678" in drawn
    assert is_whole("prefill-10", drawn)


def test_what_no_terminal_shows_is_wide(capsys: pytest.CaptureFixture[str]) -> None:
    assert open_console().width == 160
