"""How a face and the holder of a stage prove to each other that both have the same token.

The token itself never travels: a record in the registry may have been put there by anybody.
"""

import hashlib
import hmac
import secrets
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from pdserve.errors import ConfigError, WorkerLost
from pdserve.request import Incarnation
from pdserve.rpc.channel import AsyncChannel, ChannelClosed
from pdserve.rpc.v1 import stage_pb2
from pdserve.version import VERSION

MAX_HELLO_BYTES = 1024
"""What an end may send before it has proven who it is."""
MIN_TOKEN_CHARS = 16
_NONCE_BYTES = 32


class HelloRefused(Exception):
    """A connection that is not what it should be; the text says why, for the log."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """What a face wants of a stage."""

    worker_id: str
    incarnation: Incarnation
    """Of the face."""
    stage: int
    rank: int | None = None
    """None for the connection that carries orders."""


def check_token(token: str | None) -> bytes:
    """Returns the token as bytes.

    Raises:
        ConfigError: there is none, or it could be guessed.
    """
    if token is None or len(token) < MIN_TOKEN_CHARS:
        have = 0 if token is None else len(token)
        raise ConfigError(
            f"stage_token must have at least {MIN_TOKEN_CHARS} characters (PDSERVE_STAGE_TOKEN, "
            f"the same for a worker and its stages), got {have}",
            settings=("stage_token",),
        )
    return token.encode()


async def knock(channel: AsyncChannel, token: bytes, claim: Claim) -> stage_pb2.StageAccepted:
    """Does the face's part; the caller sets the deadline.

    Raises:
        WorkerLost: the other end has not the token, or has left.
    """
    hello = stage_pb2.StageHello(
        worker_id=claim.worker_id,
        incarnation=claim.incarnation,
        stage=claim.stage,
        rank=claim.rank,
        nonce=secrets.token_bytes(_NONCE_BYTES),
    )
    try:
        await _send(channel, stage_pb2.ToStage(hello=hello))
        answer = await receive_from_stage(channel)
        challenge = answer.challenge
        if not answer.HasField("challenge") or not _is_proven(
            challenge.proof, token, b"holder", hello, challenge.nonce
        ):
            raise WorkerLost(f"what answers for stage {claim.stage} has another stage_token")
        proof = _prove(token, b"face", hello, challenge.nonce)
        await _send(channel, stage_pb2.ToStage(proof=stage_pb2.StageProof(proof=proof)))
        answer = await receive_from_stage(channel)
    except ChannelClosed as error:
        raise WorkerLost(f"stage {claim.stage} hung up: {error}") from error
    if not answer.HasField("accepted"):
        raise WorkerLost(f"stage {claim.stage} speaks out of turn")
    channel.trust()
    return answer.accepted


async def admit(channel: AsyncChannel, token: bytes, *, worker_id: str, stage: int) -> Claim:
    """Does the holder's part, up to the proof; `accept` ends it. The caller sets the deadline.

    Raises:
        HelloRefused: the other end is no face of this worker, or has left.
    """
    try:
        hello = (await receive_to_stage(channel)).hello
        if (hello.worker_id, hello.stage) != (worker_id, stage):
            raise HelloRefused("a hello for another stage, or none")
        if len(hello.nonce) != _NONCE_BYTES:
            raise HelloRefused("a hello without a nonce")
        nonce = secrets.token_bytes(_NONCE_BYTES)
        challenge = stage_pb2.StageChallenge(
            nonce=nonce, proof=_prove(token, b"holder", hello, nonce)
        )
        await channel.send(stage_pb2.FromStage(challenge=challenge).SerializeToString())
        proof = (await receive_to_stage(channel)).proof.proof
    except ChannelClosed as error:
        raise HelloRefused(str(error)) from error
    if not _is_proven(proof, token, b"face", hello, nonce):
        raise HelloRefused("a wrong proof of the token")
    channel.trust()
    return Claim(
        worker_id=worker_id,
        incarnation=Incarnation(hello.incarnation),
        stage=stage,
        rank=hello.rank if hello.HasField("rank") else None,
    )


async def accept(channel: AsyncChannel, node: str) -> None:
    """Tells a face that has proven itself that its claim is granted.

    Raises:
        ChannelClosed: it has left.
    """
    accepted = stage_pb2.StageAccepted(version=VERSION, node=node)
    await channel.send(stage_pb2.FromStage(accepted=accepted).SerializeToString())


async def receive_from_stage(channel: AsyncChannel) -> stage_pb2.FromStage:
    """Receives what a holder says.

    Raises:
        ChannelClosed: it has left, or these are no messages.
    """
    try:
        return stage_pb2.FromStage.FromString(await channel.receive())
    except DecodeError as error:
        raise ChannelClosed("bytes that are no message") from error


async def receive_to_stage(channel: AsyncChannel) -> stage_pb2.ToStage:
    """Receives what a face says.

    Raises:
        ChannelClosed: it has left, or these are no messages.
    """
    try:
        return stage_pb2.ToStage.FromString(await channel.receive())
    except DecodeError as error:
        raise ChannelClosed("bytes that are no message") from error


async def _send(channel: AsyncChannel, message: stage_pb2.ToStage) -> None:
    await channel.send(message.SerializeToString())


def _prove(token: bytes, who: bytes, hello: stage_pb2.StageHello, nonce: bytes) -> bytes:
    # Every field of the hello, each of fixed width or behind its length.
    said = hello.SerializeToString(deterministic=True)
    text = b"%s|%d|%s|%s" % (who, len(said), said, nonce)
    return hmac.digest(token, text, hashlib.sha256)


def _is_proven(
    proof: bytes, token: bytes, who: bytes, hello: stage_pb2.StageHello, nonce: bytes
) -> bool:
    return hmac.compare_digest(proof, _prove(token, who, hello, nonce))
