import pytest

from pdserve.detokenizer import TokenTable
from pdserve.request import FinishReason, SamplingParams
from pdserve.rpc.v1 import types_pb2, worker_pb2
from router.attempt import Finish, Token
from router.client_buffer import ClientBuffer, Ending
from router.output import Delta, Output
from router.timing import RequestTimes

TABLE = TokenTable(
    token_bytes=(b"<eos>", b"ab", b"cST", b"OP!", b"x", b"\xe2\x82", b"\xac"),
    special_ids=frozenset({0}),
)
LENGTH = Finish(reason=FinishReason.LENGTH, stop_token_id=None)


def _tokens(*token_ids: int, start: int = 0) -> list[Token]:
    return [
        Token(
            index=start + offset,
            token_id=token_id,
            logprob=types_pb2.TokenLogprob(token_id=token_id, logprob=-1.0),
        )
        for offset, token_id in enumerate(token_ids)
    ]


def _output(**sampling: object) -> Output:
    return Output(TABLE, SamplingParams(max_tokens=10, **sampling))


@pytest.mark.parametrize("cut", [1, 2, 3, 4])
def test_D8_the_token_that_completes_a_stop_is_the_last_that_counts(cut):
    output = _output(stop=("STOP",))
    ids = (1, 2, 3, 4, 4)
    total = Delta()
    for part in (ids[:cut], ids[cut:]):
        if output.matched_stop is None:
            total.extend(output.push(_tokens(*part), None))
    assert output.matched_stop == "STOP"
    assert total.text == "abc"
    assert total.token_ids == [1, 2, 3]
    assert [one.token_id for one in total.logprobs] == [1, 2, 3]
    assert output.num_tokens == 3


def test_held_back_text_is_released_at_the_end():
    output = _output(stop=("STOP",))
    assert output.push(_tokens(1, 2), None).text == "abc"
    assert output.push([], LENGTH).text == "ST"


def test_a_stop_in_the_included_form_is_part_of_the_text():
    output = _output(stop=("STOP",), include_stop_in_output=True)
    assert output.push(_tokens(1, 2, 3), None).text == "abcSTOP"


def test_a_stop_does_not_count_in_the_first_min_tokens():
    output = _output(stop=("ab",), min_tokens=1)
    assert output.push(_tokens(1, 4), None).text == "abx"
    assert output.matched_stop is None
    assert output.push(_tokens(1), None).text == ""
    assert output.matched_stop == "ab"


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abx")])
def test_the_text_of_a_stop_token_is_hidden_but_its_id_counts(include, text):
    output = _output(stop_token_ids=(4,), include_stop_in_output=include)
    finish = Finish(reason=FinishReason.STOP, stop_token_id=4)
    delta = output.push(_tokens(1, 4), finish)
    assert delta.text == text
    assert delta.token_ids == [1, 4]


def test_a_character_over_two_tokens_comes_with_the_second():
    output = _output()
    assert output.push(_tokens(5), None).text == ""
    assert output.push(_tokens(6), None).text == "€"


def test_a_cut_character_is_marked_at_the_end():
    output = _output()
    assert output.push(_tokens(4, 5), LENGTH).text == "x\ufffd"


async def _drain(buffer: ClientBuffer) -> list[Delta]:
    taken = []
    while (delta := await buffer.take()) is not None:
        taken.append(delta)
    return taken


async def test_what_waits_is_merged_and_the_end_comes_last():
    buffer = ClientBuffer(1000)
    assert buffer.push(Delta(token_ids=[1], text="a"))
    assert buffer.push(Delta(token_ids=[2], text="b"))
    assert buffer.end(Ending(error=None))
    assert not buffer.end(Ending(error=None))
    (delta,) = await _drain(buffer)
    assert (delta.token_ids, delta.text) == ([1, 2], "ab")
    assert buffer.pending_bytes == 0


async def test_output_that_comes_while_one_delta_is_written_is_not_lost():
    buffer = ClientBuffer(1000)
    buffer.push(Delta(token_ids=[1]))
    seen = []
    while (delta := await buffer.take()) is not None:
        seen += delta.token_ids
        if len(seen) < 5:
            buffer.push(Delta(token_ids=[len(seen) + 1]))
        else:
            buffer.end(Ending())
    assert seen == [1, 2, 3, 4, 5]


async def test_D11_the_buffer_is_bounded_and_a_cut_interrupts_the_handler():
    buffer = ClientBuffer(500)
    cuts = []
    buffer.interrupt_with(lambda: cuts.append(True))
    pushed = 0
    while buffer.push(Delta(token_ids=[1], text="x" * 10)):
        pushed += 1
    assert 1 < pushed < 10
    buffer.cut(ValueError("slow"))
    assert cuts == [True]
    assert buffer.pending_bytes == 0
    assert await _drain(buffer) == []


def test_the_timeline_adds_attempts_and_takes_the_last_word_of_each():
    times = RequestTimes(received_s=10.0)
    times.note_dispatch(10.5)
    times.note_dispatch(13.0)
    stages = worker_pb2.StageTimes
    times.note_stages(1, stages(queue_s=1.0, prefill_s=2.0, cached_tokens=0))
    times.note_stages(1, stages(queue_s=1.0, prefill_s=2.0, handoff_s=0.5))
    times.note_stages(2, stages(queue_s=0.25, prefill_s=1.0, cached_tokens=64))
    times.note_tokens(1, 12.0)
    times.note_tokens(1, 15.0)
    times.note_tokens(2, 16.0)
    timeline = times.timeline(
        now_s=17.0, prefill_worker="p", decode_worker="d", attempts=2, preemptions=0
    )
    assert timeline.queue_s == 0.5 + 1.25
    assert (timeline.prefill_s, timeline.handoff_s) == (3.0, 0.5)
    assert (timeline.ttft_s, timeline.first_gap_s, timeline.max_gap_s) == (2.0, 3.0, 3.0)
    assert timeline.tpot_s == pytest.approx(4.0 / 3)
    assert (timeline.decode_s, timeline.total_s) == (4.0, 7.0)
    assert times.cached_tokens == 0


def test_one_token_has_no_tpot_and_none_no_ttft():
    times = RequestTimes(received_s=1.0)
    assert times.ttft_s is None
    times.note_tokens(1, 2.0)
    assert times.tpot_s is None
    assert times.decode_s == 0.0
