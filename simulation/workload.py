"""What clients ask for: when, how long, and which beginnings they share.

A prompt is a row of pieces. Two prompts share a prefix as far as their pieces are equal, so a
trace's hashes of blocks, a system prompt or the turns of a conversation are all said in one way.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple


class Piece(NamedTuple):
    """Tokens that are one and the same wherever the piece stands at the same place."""

    content: int
    """Which tokens: in 0 .. 2^31."""
    num_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """One request of a workload."""

    at_s: float
    pieces: tuple[Piece, ...]
    num_output_tokens: int
    output_content: int | None = None
    """What the answer consists of, if another prompt goes on from it."""
    tenant: str = ""
    """Who waits in the router gets a fair share of turns with other tenants."""
    priority: int = 0
    """Smaller goes first."""

    @property
    def num_prompt_tokens(self) -> int:
        """Of all pieces."""
        return sum(piece.num_tokens for piece in self.pieces)

    def prompt(self) -> tuple[int, ...]:
        """Returns the token ids: each piece is its content over and over."""
        tokens: list[int] = []
        for content, num_tokens in self.pieces:
            tokens += (content,) * num_tokens
        return tuple(tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Requests in the order of their arrival."""

    name: str
    arrivals: tuple[Arrival, ...]

    @property
    def duration_s(self) -> float:
        """From the first arrival to the last."""
        return self.arrivals[-1].at_s - self.arrivals[0].at_s if self.arrivals else 0.0

    @property
    def num_prompt_tokens(self) -> int:
        """Of all requests."""
        return sum(one.num_prompt_tokens for one in self.arrivals)

    @property
    def num_output_tokens(self) -> int:
        """Of all requests."""
        return sum(one.num_output_tokens for one in self.arrivals)


def make_workload(name: str, arrivals: Iterable[Arrival]) -> Workload:
    """Sorts requests by their time; those of one instant keep their order."""
    return Workload(name=name, arrivals=tuple(sorted(arrivals, key=lambda one: one.at_s)))


def scale_lengths(workload: Workload, divisor: float) -> Workload:
    """Divides all lengths, so that a small model can take them; what was shared still is.

    Borders between pieces are divided, not their lengths, so no rounding adds up; each request
    keeps one token of prompt and one of output.
    """
    assert divisor > 0
    return replace(
        workload,
        name=f"{workload.name}, lengths / {divisor:g}",
        arrivals=tuple(
            replace(
                one,
                pieces=_scale_pieces(one.pieces, divisor),
                num_output_tokens=max(1, round(one.num_output_tokens / divisor)),
            )
            for one in workload.arrivals
        ),
    )


def scale_rate(workload: Workload, factor: float) -> Workload:
    """Lets requests come so many times faster."""
    assert factor > 0
    arrivals = tuple(replace(one, at_s=one.at_s / factor) for one in workload.arrivals)
    return replace(workload, name=f"{workload.name}, rate x {factor:g}", arrivals=arrivals)


def cut_time(workload: Workload, seconds: float) -> Workload:
    """Keeps what arrives in the first seconds."""
    return replace(
        workload,
        name=f"{workload.name}, first {seconds:g} s",
        arrivals=tuple(one for one in workload.arrivals if one.at_s < seconds),
    )


def limit_lengths(workload: Workload, max_tokens: int) -> Workload:
    """Leaves out requests whose prompt and output exceed a model's length."""
    kept = tuple(
        one
        for one in workload.arrivals
        if one.num_prompt_tokens + one.num_output_tokens <= max_tokens
    )
    num_gone = len(workload.arrivals) - len(kept)
    if not num_gone:
        return workload
    name = f"{workload.name}, {num_gone} longer than {max_tokens} tokens left out"
    return replace(workload, name=name, arrivals=kept)


def _scale_pieces(pieces: Sequence[Piece], divisor: float) -> tuple[Piece, ...]:
    scaled, end, scaled_end = [], 0, 0
    for piece in pieces:
        end += piece.num_tokens
        num_tokens = round(end / divisor) - scaled_end
        if num_tokens:
            scaled.append(Piece(piece.content, num_tokens))
            scaled_end += num_tokens
    return tuple(scaled) or (Piece(pieces[-1].content, 1),)
