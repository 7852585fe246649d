import asyncio

from pdserve.face.past_samples import MAX_SAMPLES_A_KIND, PastSamples
from pdserve.face.streams import FrontStreams, Standing
from pdserve.face.token_log import TokenLog
from pdserve.request import FrontId, Incarnation, RequestId
from pdserve.rpc.v1 import types_pb2, worker_pb2
from pdserve.timeline import ManualClock
from tests.support.router_harness import let_others_run

FRONT = FrontId("front")


def make_streams(clock: ManualClock) -> FrontStreams:
    log = TokenLog(clock)
    load = types_pb2.WorkerLoad(total_blocks=8)
    return FrontStreams(log, Incarnation(77), clock, lambda: Standing(load=load))


def make_update(index: int, token: int) -> worker_pb2.SequenceUpdate:
    return worker_pb2.SequenceUpdate(
        request_id="r", attempt=1, first_index=index, token_ids=[token]
    )


async def test_a_stream_begins_with_load_figures_and_then_carries_updates() -> None:
    streams = make_streams(ManualClock())
    batches = streams.serve(worker_pb2.StreamRequest(front_id=FRONT))
    first = await anext(batches)
    assert (first.incarnation, first.load.total_blocks) == (77, 8)
    streams.publish(FRONT, make_update(0, 5))
    second = await anext(batches)
    assert list(second.updates[0].token_ids) == [5]
    await batches.aclose()


async def test_a_second_stream_of_a_front_ends_the_first() -> None:
    streams = make_streams(ManualClock())
    old = streams.serve(worker_pb2.StreamRequest(front_id=FRONT))
    await anext(old)
    waiting = asyncio.ensure_future(anext(old, None))
    await let_others_run(1)
    new = streams.serve(worker_pb2.StreamRequest(front_id=FRONT))
    await anext(new)
    assert await waiting is None
    streams.publish(FRONT, make_update(0, 5))
    assert list((await anext(new)).updates[0].token_ids) == [5]
    await new.aclose()


async def test_requests_of_a_front_that_stays_away_become_orphans_once() -> None:
    clock = ManualClock()
    streams = make_streams(clock)
    batches = streams.serve(worker_pb2.StreamRequest(front_id=FRONT))
    await anext(batches)
    streams.publish(FRONT, make_update(0, 5))
    await batches.aclose()
    clock.advance(5.0)
    assert streams.take_orphans(10.0) == []
    clock.advance(6.0)
    assert streams.take_orphans(10.0) == [(RequestId("r"), 1)]
    assert streams.take_orphans(10.0) == []


async def test_a_report_is_sent_once_a_stream_and_not_with_every_token() -> None:
    clock = ManualClock()
    load = types_pb2.WorkerLoad(report=1, num_running=3)
    log = TokenLog(clock)
    streams = FrontStreams(log, Incarnation(1), clock, lambda: Standing(load=load))
    stream = streams.serve(worker_pb2.StreamRequest(front_id="f"))
    first = await anext(stream)
    assert first.load.num_running == 3
    seen = []
    for index in range(4):
        if index == 2:
            load.report = 2
        update = worker_pb2.SequenceUpdate(request_id="r", attempt=1, first_index=index)
        update.token_ids.append(7)
        streams.publish(FrontId("f"), update)
        batch = await anext(stream)
        seen.append(batch.load.report if batch.HasField("load") else None)
    assert seen == [None, None, 2, None]
    again = streams.serve(worker_pb2.StreamRequest(front_id="f"))
    assert (await anext(again)).load.report == 2


def decode_sample(seconds: float) -> types_pb2.StepSample:
    return types_pb2.StepSample(seconds=seconds, decode=types_pb2.DecodeStep(num_sequences=1))


def report_of(number: int, *samples: types_pb2.StepSample) -> types_pb2.WorkerLoad:
    return types_pb2.WorkerLoad(report=number, samples=samples)


async def test_a_front_that_learned_nothing_yet_is_told_of_earlier_reports_once() -> None:
    streams = make_streams(ManualClock())
    transfer = types_pb2.StepSample(seconds=0.3, transfer=types_pb2.Transfer(num_bytes=9))
    streams.remember(report_of(1, decode_sample(0.1), decode_sample(0.2)))
    streams.remember(report_of(2, transfer))
    request = worker_pb2.StreamRequest(front_id=FRONT, wants_past_samples=True)
    batches = streams.serve(request)
    assert [one.seconds for one in (await anext(batches)).past_samples] == [0.1, 0.2, 0.3]
    streams.publish(FRONT, make_update(0, 5))
    assert not (await anext(batches)).past_samples
    await batches.aclose()
    later = streams.serve(worker_pb2.StreamRequest(front_id=FRONT))
    assert not (await anext(later)).past_samples
    await later.aclose()


def test_only_the_last_samples_of_each_kind_are_kept() -> None:
    past = PastSamples()
    for number in range(1000):
        past.add(report_of(number, decode_sample(float(number))))
    prefill = types_pb2.StepSample(seconds=7.0, prefill=types_pb2.PrefillStep(num_tokens=3))
    past.add(report_of(1000, prefill))
    found = list(past)
    assert len(found) == MAX_SAMPLES_A_KIND + 1
    assert (found[0].seconds, found[-2].seconds) == (1000 - MAX_SAMPLES_A_KIND, 999.0)
    assert found[-1].WhichOneof("kind") == "prefill"
    assert [one.seconds for one in past.since(998)] == [999.0, 7.0]


async def test_streams_that_end_say_first_what_is_left() -> None:
    streams = make_streams(ManualClock())
    heard: list[int] = []

    async def listen() -> None:
        async for batch in streams.serve(worker_pb2.StreamRequest(front_id=FRONT)):
            heard.extend(token for update in batch.updates for token in update.token_ids)

    listening = asyncio.create_task(listen())
    await let_others_run(1)
    streams.publish(FRONT, make_update(0, 5))
    await asyncio.gather(streams.end(5.0), listening)
    assert heard == [5]
    assert [batch async for batch in streams.serve(worker_pb2.StreamRequest(front_id="late"))]


async def test_a_front_that_does_not_read_holds_the_end_up_for_a_bounded_time_only() -> None:
    streams = make_streams(ManualClock())
    await streams.end(5.0)
    frozen = streams.serve(worker_pb2.StreamRequest(front_id=FRONT))
    await anext(frozen)
    await streams.end(0.01)
    assert [batch async for batch in frozen] == []


async def test_the_last_words_of_a_worker_say_that_it_flips() -> None:
    clock, standings = ManualClock(), [Standing(load=types_pb2.WorkerLoad())]
    streams = FrontStreams(TokenLog(clock), Incarnation(1), clock, lambda: standings[-1])
    stream = streams.serve(worker_pb2.StreamRequest(front_id=FRONT))
    first = await anext(stream)
    assert (first.is_draining, first.is_flipping) == (False, False)
    # No message since: it was empty at once.
    standings.append(Standing(load=first.load, is_draining=True, is_flipping=True))
    ending = asyncio.create_task(streams.end(5.0))
    heard = [(batch.is_draining, batch.is_flipping) async for batch in stream]
    await ending
    assert heard == [(True, True)]
