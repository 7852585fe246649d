"""Workloads that are made up: the same for the same seed.

Lengths are log-normal around their mean, arrivals have a mean rate and, as a Gamma process, any
burstiness: a shape of 1 is Poisson, one below it bursts.
"""

import math
import random
from dataclasses import dataclass
from itertools import count

from simulation.load_shapes import Rate
from simulation.workload import Arrival, Piece, Workload, make_workload

_SLOT_S = 0.2
"""A rate that changes is even for so long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """How long prompts and outputs are."""

    mean_prompt_tokens: float = 2000.0
    mean_output_tokens: float = 200.0
    spread: float = 0.6
    """Standard deviation of a length's logarithm; 0: all are equal."""

    def draw_prompt(self, numbers: random.Random) -> int:
        """Returns a prompt's length."""
        return _draw(numbers, self.mean_prompt_tokens, self.spread)

    def draw_output(self, numbers: random.Random) -> int:
        """Returns an output's length."""
        return _draw(numbers, self.mean_output_tokens, self.spread)


def make_arrival_times(
    num_requests: int, rate_per_s: float, seed: int, *, shape: float = 1.0
) -> list[float]:
    """Returns times of a Gamma process of a mean rate."""
    numbers = random.Random(seed)
    times, now_s = [], 0.0
    for _ in range(num_requests):
        now_s += numbers.gammavariate(shape, 1.0 / (rate_per_s * shape))
        times.append(now_s)
    return times


def make_shaped_times(rate: Rate, duration_s: float, seed: int) -> list[float]:
    """Returns times of a Poisson process whose rate changes."""
    numbers = random.Random(f"shaped {seed}")
    times: list[float] = []
    for index in range(math.ceil(duration_s / _SLOT_S)):
        slot_s = index * _SLOT_S
        end_s = min(slot_s + _SLOT_S, duration_s)
        now_s, per_s = slot_s, rate(slot_s)
        while per_s > 0:
            now_s += numbers.expovariate(per_s)
            if now_s >= end_s:
                break
            times.append(now_s)
    return times


def make_shaped(name: str, rate: Rate, duration_s: float, lengths: Lengths, seed: int) -> Workload:
    """Makes requests that share nothing and come at a rate that changes."""
    return _make_unshared(name, make_shaped_times(rate, duration_s, seed), lengths, seed)


def make_plain(
    num_requests: int,
    rate_per_s: float,
    lengths: Lengths,
    seed: int,
    *,
    shape: float = 1.0,
) -> Workload:
    """Makes requests that share nothing."""
    name = "poisson" if shape == 1.0 else f"gamma {shape:g}"
    times = make_arrival_times(num_requests, rate_per_s, seed, shape=shape)
    return _make_unshared(name, times, lengths, seed)


def _make_unshared(name: str, times: list[float], lengths: Lengths, seed: int) -> Workload:
    numbers = random.Random(f"plain {seed}")
    return make_workload(
        name,
        [
            Arrival(
                at_s=at_s,
                pieces=(Piece(number, lengths.draw_prompt(numbers)),),
                num_output_tokens=lengths.draw_output(numbers),
            )
            for number, at_s in enumerate(times)
        ],
    )


def make_hot_prefix(
    num_requests: int,
    rate_per_s: float,
    lengths: Lengths,
    seed: int,
    *,
    num_prefixes: int = 64,
    prefix_tokens: int = 4096,
    skew: float = 1.0,
) -> Workload:
    """Makes requests behind a few long system prompts, the n-th of them drawn as 1 / n^skew."""
    numbers = random.Random(f"hot {seed}")
    times = make_arrival_times(num_requests, rate_per_s, seed)
    weights = [1.0 / (rank + 1) ** skew for rank in range(num_prefixes)]
    prefixes = numbers.choices(range(num_prefixes), weights, k=num_requests)
    return make_workload(
        "hot prefix",
        [
            Arrival(
                at_s=at_s,
                pieces=(
                    Piece(prefix, prefix_tokens),
                    Piece(num_prefixes + number, lengths.draw_prompt(numbers)),
                ),
                num_output_tokens=lengths.draw_output(numbers),
            )
            for number, (at_s, prefix) in enumerate(zip(times, prefixes, strict=True))
        ],
    )


def make_agent_tree(
    num_sessions: int,
    sessions_per_s: float,
    lengths: Lengths,
    seed: int,
    *,
    num_turns: int = 6,
    system_tokens: int = 2048,
    pause_s: float = 8.0,
) -> Workload:
    """Makes agents: turns that go on from all before them, some of which try several ways at once.

    All share one system prompt. A turn's prompt is the last one's, its output and new text; with a
    chance of one in three a turn is asked in two ways, of which one is gone on with.
    """
    numbers = random.Random(f"tree {seed}")
    contents = count(1)
    arrivals: list[Arrival] = []
    for start_s in make_arrival_times(num_sessions, sessions_per_s, seed):
        context: tuple[Piece, ...] = (Piece(0, system_tokens),)
        at_s = start_s
        for _ in range(num_turns):
            ways = 2 if numbers.random() < 1 / 3 else 1
            answers = []
            for _ in range(ways):
                asked = Piece(next(contents), lengths.draw_prompt(numbers))
                num_output = lengths.draw_output(numbers)
                prompt = (*context, asked)
                answer = Piece(next(contents), num_output)
                arrivals.append(
                    Arrival(
                        at_s=at_s,
                        pieces=prompt,
                        num_output_tokens=num_output,
                        output_content=answer.content,
                    )
                )
                answers.append((*prompt, answer))
            context = numbers.choice(answers)
            at_s += numbers.expovariate(1.0 / pause_s) + pause_s / 2
    return make_workload("agent tree", arrivals)


def _draw(numbers: random.Random, mean: float, spread: float) -> int:
    # The mean of exp(normal(m, s)) is exp(m + s^2 / 2).
    return max(1, round(numbers.lognormvariate(math.log(mean) - spread**2 / 2, spread)))
