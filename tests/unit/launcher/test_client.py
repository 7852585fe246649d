import json

import grpc
import pytest
from rich.console import Console

from launcher.client import Generation, client_error, to_dict
from launcher.commands.status import (
    process_to_dict,
    processes_table,
    worker_to_dict,
    workers_table,
)
from pdserve.errors import DeadlineExceeded, InternalError, NoWorker, WorkerLost
from pdserve.rpc.status import DETAILS_KEY, status_of
from pdserve.rpc.v1 import inference_pb2, types_pb2


def chunk(sequence: int, ids: list[int], text: str) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(
        request_id="r1",
        sequence=sequence,
        chunk=inference_pb2.TokenChunk(
            token_ids=ids,
            text=text,
            logprobs=[
                types_pb2.TokenLogprob(
                    token_id=i,
                    logprob=-0.5,
                    top=[types_pb2.TopLogprob(token_id=i, logprob=-0.5)],
                )
                for i in ids
            ],
        ),
    )


def completion(sequence: int, **finish: object) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(
        request_id="r1",
        sequence=sequence,
        completion=inference_pb2.Completion(
            samples=[inference_pb2.SampleFinish(**finish)],
            usage=types_pb2.Usage(prompt_tokens=3, completion_tokens=2),
            timeline=types_pb2.Timeline(ttft_s=0.25, kv_bytes_shipped=2**40, decode_worker="d"),
        ),
    )


def test_stream_is_gathered_into_ids_text_and_sequence_numbers() -> None:
    generation = Generation()
    texts = [
        generation.add(message)
        for message in (
            chunk(0, [5], "Hel"),
            chunk(1, [6], "lo"),
            completion(2, finish_reason=types_pb2.FINISH_REASON_LENGTH),
        )
    ]
    assert texts == ["Hel", "lo", ""]
    assert generation.token_ids == [5, 6]
    assert generation.text == "Hello"
    assert generation.sequences == [0, 1, 2]
    assert generation.finish_reason == "length"


def test_json_names_every_field_and_keeps_large_numbers_whole() -> None:
    generation = Generation()
    generation.add(chunk(0, [5], "x"))
    generation.add(completion(1, finish_reason=types_pb2.FINISH_REASON_STOP, stop_string="END"))
    found = json.loads(json.dumps(to_dict(generation)))
    assert found["finish_reason"] == "stop"
    assert found["matched_stop"] == "END"
    assert found["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 0}
    assert found["timeline"]["kv_bytes_shipped"] == 2**40
    assert found["timeline"]["recomputed_tokens"] == 0
    assert set(found["timeline"]) == {f.name for f in types_pb2.Timeline.DESCRIPTOR.fields}
    assert found["logprobs"] == [
        {"token_id": 5, "logprob": -0.5, "top": [{"token_id": 5, "logprob": -0.5}]}
    ]


def test_matched_stop_token_zero_is_not_lost() -> None:
    generation = Generation()
    generation.add(completion(0, finish_reason=types_pb2.FINISH_REASON_STOP, stop_token_id=0))
    assert to_dict(generation)["matched_stop"] == 0


def test_stream_without_a_completion_has_no_finish_reason() -> None:
    generation = Generation()
    generation.add(chunk(0, [5], "x"))
    with pytest.raises(InternalError, match="ended without a completion"):
        to_dict(generation)


def failed_call(
    text: str,
    details: bytes | None = None,
    code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE,
) -> grpc.RpcError:
    trailing = () if details is None else ((DETAILS_KEY, details),)
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: "
            "Failed to connect to remote host: connect: Connection refused (111)",
            "nobody serves at a:1",
        ),
        ("DNS resolution failed for a:1: C-ares status is not ARES_SUCCESS", "nobody serves at"),
        ("Socket closed", "the connection to the router broke"),
        ("recvmsg:Connection reset by peer", "the connection to the router broke"),
    ],
)
def test_words_of_grpc_are_not_shown(text: str, shown: str) -> None:
    found = client_error(failed_call(text), "a:1")
    assert isinstance(found, WorkerLost)
    assert str(found).startswith(shown)
    assert text[:14] not in str(found)


def test_a_deadline_of_ones_own_is_told_in_plain_words() -> None:
    error = failed_call(
        "Stream removed (Deadline Exceeded)", None, grpc.StatusCode.DEADLINE_EXCEEDED
    )
    found = client_error(error, "a:1")
    assert type(found) is DeadlineExceeded
    assert "within the time that it was given" in str(found)
    assert "Stream removed" not in str(found)


def test_what_the_server_said_is_shown() -> None:
    error = NoWorker("this router stopped")
    found = client_error(failed_call(str(error), status_of(error).SerializeToString()), "a:1")
    assert type(found) is NoWorker
    assert "this router stopped" in str(found)


def test_status_shows_who_is_gone_and_whose_process_is_whose() -> None:
    console = Console(width=120)
    workers = [
        inference_pb2.WorkerInfo(
            worker_id="d0",
            role="decode",
            state="ready",
            face_pid=11,
            ranks=[
                inference_pb2.RankInfo(rank=0, stage=0, node="10.0.0.1", pid=12),
                inference_pb2.RankInfo(rank=1, stage=0, node="10.0.0.1", pid=13),
                inference_pb2.RankInfo(rank=2, stage=1, node="10.0.0.2", pid=7),
                inference_pb2.RankInfo(rank=3, stage=1, node="10.0.0.2", pid=8),
            ],
        ),
        inference_pb2.WorkerInfo(worker_id="d1", role="decode", state="gone"),
        inference_pb2.WorkerInfo(worker_id="p0", role="prefill", state="flipping"),
    ]
    with console.capture() as capture:
        console.print(workers_table(workers))
    header, _, *rows = [line.split() for line in capture.get().splitlines() if line.strip()]
    assert " ".join(header).startswith("worker role state face pid ranks: node, pids waiting")
    assert rows[0] == ["d0", "decode", "ready", "11", "10.0.0.1", "12", "13"]
    assert rows[1] == ["10.0.0.2", "7", "8"]
    assert " ".join(rows[2]) == "d1 decode gone, or restarting"
    assert rows[3] == ["p0", "prefill", "flipping"]


def test_status_shows_each_front_and_the_brain() -> None:
    processes = [
        inference_pb2.RouterProcess(
            name="front-0", pid=21, state="serving", uptime_s=7.4, requests_in_flight=3
        ),
        inference_pb2.RouterProcess(name="front-1", pid=22, state="silent"),
        inference_pb2.RouterProcess(name="brain", pid=20, state="serving", uptime_s=8.0),
    ]
    console = Console(width=80)
    with console.capture() as capture:
        console.print(processes_table(processes))
    _, _, below = capture.get().rpartition("──")
    rows = [line.split() for line in below.splitlines() if line.strip()]
    assert rows == [
        ["front-0", "serving", "21", "7", "s", "3", "0"],
        ["front-1", "silent", "22"],
        ["brain", "serving", "20", "8", "s"],
    ]
    assert process_to_dict(processes[1]) == {
        "name": "front-1",
        "state": "silent",
        "pid": 22,
        "uptime_s": 0.0,
        "requests_in_flight": 0,
        "requests_queued": 0,
        "unheard_s": None,
    }


def test_status_shows_how_each_link_travels_and_what_did_not_come_up() -> None:
    link = inference_pb2.LinkInfo(
        peer_worker_id="p0", transport="gloo", bytes_sent=3 << 20, failures=["push: no peer access"]
    )
    worker = inference_pb2.WorkerInfo(worker_id="d0", state="ready", links=[link])
    console = Console(width=200)
    with console.capture() as capture:
        console.print(workers_table([worker]))
    assert "p0 gloo 3.0 MiB (push: no peer access)" in capture.get()
    shown = worker_to_dict(worker)["links"]
    assert isinstance(shown, list)
    assert shown[0]["transport"] == "gloo"
    assert shown[0]["failures"] == ["push: no peer access"]
