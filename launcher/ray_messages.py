"""What the launcher and its Ray driver tell each other: JSON over a socket pair.

Only orders, process ids, exit statuses and log lines travel here; requests and KV never do.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class StartFace:
    """To the driver: place actors that start this face, and the stages that it lacks."""

    life: int
    """Names one life of one replica; never used again."""
    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    ranks_of_bundles: tuple[int, ...]
    """What must be on one node each; the face is in the first."""
    uses_gpus: bool
    is_anywhere: bool
    """On any node, each process on its node's address; else on the launcher's machine."""
    stages: tuple[tuple[str, ...], ...] = ()
    """What holds the stage of each other bundle; same environment."""
    resource: str | None = None
    """As of ReplicaNeeds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DrainFace:
    """To the driver: ask a face to drain and end."""

    life: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FlipFace:
    """To the driver: ask a face to drain and go on in the other pool."""

    life: int


@dataclass(frozen=True, kw_only=True, slots=True)
class KillFace:
    """To the driver: kill an actor, and with it the face and its ranks."""

    life: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FaceStarted:
    """From the driver: the face runs."""

    life: int
    pid: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FaceLine:
    """From the driver: a line of output, of the face or about it."""

    life: int
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FaceEnded:
    """From the driver: the face is gone, or its actor is and took it along."""

    life: int
    status: int


Message = StartFace | DrainFace | FlipFace | KillFace | FaceStarted | FaceLine | FaceEnded

_KINDS = {
    kind.__name__: kind
    for kind in (StartFace, DrainFace, FlipFace, KillFace, FaceStarted, FaceLine, FaceEnded)
}


def encode(message: Message) -> bytes:
    """Packs a message."""
    return json.dumps([type(message).__name__, asdict(message)]).encode()


def decode(packet: bytes) -> Message:
    """Unpacks a message of the same version of this program."""
    kind, fields = json.loads(packet)
    for name in ("argv", "ranks_of_bundles"):
        if name in fields:
            fields[name] = tuple(fields[name])
    if "stages" in fields:
        fields["stages"] = tuple(tuple(argv) for argv in fields["stages"])
    message: Message = _KINDS[kind](**fields)
    return message
