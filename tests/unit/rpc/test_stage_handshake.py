import asyncio
import pickle
import socket
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from typing import TypeVar

import pytest

from pdserve.errors import ConfigError, WorkerLost
from pdserve.request import Incarnation
from pdserve.rpc.channel import AsyncChannel, ChannelClosed
from pdserve.rpc.stage_handshake import (
    MAX_HELLO_BYTES,
    Claim,
    HelloRefused,
    accept,
    admit,
    check_token,
    knock,
)
from pdserve.rpc.v1 import stage_pb2

T = TypeVar("T")
TOKEN = b"the token of both ends"
CLAIM = Claim(worker_id="decode-0", incarnation=Incarnation(2**63 + 5), stage=1, rank=3)


@pytest.fixture
async def ends() -> AsyncIterator[tuple[AsyncChannel, AsyncChannel]]:
    """Of the face and of the holder."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    face, holder = AsyncChannel(ours, MAX_HELLO_BYTES), AsyncChannel(theirs, MAX_HELLO_BYTES)
    yield face, holder
    face.close()
    holder.close()


async def let_in(channel: AsyncChannel, token: bytes = TOKEN, worker_id: str = "decode-0") -> Claim:
    try:
        claim = await admit(channel, token, worker_id=worker_id, stage=1)
    except HelloRefused:
        channel.shut()
        raise
    await accept(channel, "10.0.0.2")
    return claim


async def knock_or_leave(channel: AsyncChannel, token: bytes) -> stage_pb2.StageAccepted:
    try:
        return await knock(channel, token, CLAIM)
    except WorkerLost:
        channel.shut()
        raise


async def both(
    knocking: Coroutine[None, None, T], letting: Coroutine[None, None, Claim]
) -> tuple[T | BaseException, Claim | BaseException]:
    async with asyncio.timeout(5):
        return await asyncio.gather(knocking, letting, return_exceptions=True)


async def test_two_ends_with_one_token_meet(ends: tuple[AsyncChannel, AsyncChannel]) -> None:
    accepted, claim = await both(knock(ends[0], TOKEN, CLAIM), let_in(ends[1]))
    assert claim == CLAIM
    assert isinstance(accepted, stage_pb2.StageAccepted)
    assert accepted.node == "10.0.0.2"
    # What follows may be of any size.
    big = b"x" * (MAX_HELLO_BYTES + 1)
    for left, right in (ends, ends[::-1]):
        await left.send(big)
        assert await right.receive() == big


async def test_a_face_with_another_token_is_refused(
    ends: tuple[AsyncChannel, AsyncChannel],
) -> None:
    # The face finds out first: it would not prove anything to a stranger.
    knocked, claim = await both(knock_or_leave(ends[0], b"some other token"), let_in(ends[1]))
    assert isinstance(knocked, WorkerLost)
    assert isinstance(claim, HelloRefused)


async def test_a_face_that_only_pretends_to_have_the_token_is_refused(
    ends: tuple[AsyncChannel, AsyncChannel],
) -> None:
    async def pretend() -> None:
        hello = stage_pb2.StageHello(worker_id="decode-0", stage=1, nonce=bytes(32))
        await ends[0].send(stage_pb2.ToStage(hello=hello).SerializeToString())
        challenge = stage_pb2.FromStage.FromString(await ends[0].receive()).challenge
        # The holder's own proof is no proof of the face.
        proof = stage_pb2.StageProof(proof=challenge.proof)
        await ends[0].send(stage_pb2.ToStage(proof=proof).SerializeToString())

    _, claim = await both(pretend(), let_in(ends[1]))
    assert isinstance(claim, HelloRefused)
    assert str(claim) == "a wrong proof of the token"


async def test_a_holder_with_another_token_learns_nothing_it_could_use(
    ends: tuple[AsyncChannel, AsyncChannel],
) -> None:
    sent: list[bytes] = []

    async def listen() -> Claim:
        sent.append(await ends[1].receive())
        challenge = stage_pb2.StageChallenge(nonce=bytes(32), proof=bytes(32))
        await ends[1].send(stage_pb2.FromStage(challenge=challenge).SerializeToString())
        with suppress(ChannelClosed):
            sent.append(await ends[1].receive())
        return CLAIM

    knocked, _ = await both(knock_or_leave(ends[0], TOKEN), listen())
    assert isinstance(knocked, WorkerLost)
    assert "another stage_token" in str(knocked)
    assert len(sent) == 1
    assert TOKEN not in sent[0]


class Recorder(AsyncChannel):
    """Notes what comes."""

    def __init__(self, channel: AsyncChannel, heard: list[bytes]) -> None:
        super().__init__(channel.detach())
        self._heard = heard

    async def receive(self) -> bytes:
        message = await super().receive()
        self._heard.append(message)
        return message


async def test_the_proof_of_one_conversation_is_worth_nothing_in_the_next() -> None:
    said: list[bytes] = []
    for is_replay in (False, True):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ours = socket.create_connection(listener.getsockname())
            theirs, _ = listener.accept()
        face, holder = AsyncChannel(ours), AsyncChannel(theirs)
        if not is_replay:
            recorder = Recorder(holder, said)
            _, claim = await both(knock(face, TOKEN, CLAIM), let_in(recorder))
            assert claim == CLAIM
            assert len(said) == 2
        else:

            async def replay(channel: AsyncChannel = face) -> None:
                for message in said:
                    await channel.send(message)

            _, claim = await both(replay(), let_in(holder))
            assert isinstance(claim, HelloRefused)
        face.close()
        holder.close()


@pytest.mark.parametrize(
    "message",
    [
        b"",
        pickle.dumps(print),
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 100,
        b"x" * (MAX_HELLO_BYTES + 1),
        stage_pb2.ToStage(beat=stage_pb2.StageBeat()).SerializeToString(),
        stage_pb2.ToStage(
            hello=stage_pb2.StageHello(worker_id="decode-0", stage=1)
        ).SerializeToString(),
        stage_pb2.ToStage(
            hello=stage_pb2.StageHello(worker_id="decode-0", stage=2, nonce=bytes(32))
        ).SerializeToString(),
        stage_pb2.ToStage(
            hello=stage_pb2.StageHello(worker_id="decode-1", stage=1, nonce=bytes(32))
        ).SerializeToString(),
    ],
)
async def test_what_is_no_hello_for_this_stage_is_refused(
    ends: tuple[AsyncChannel, AsyncChannel], message: bytes
) -> None:
    _, claim = await both(ends[0].send(message), let_in(ends[1]))
    assert isinstance(claim, HelloRefused)


@pytest.mark.parametrize("token", [None, "", "short"])
def test_a_token_that_could_be_guessed_is_refused(token: str | None) -> None:
    with pytest.raises(ConfigError, match="stage_token must have at least 16 characters"):
        check_token(token)
