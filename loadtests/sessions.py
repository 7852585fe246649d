"""What one user asks, one request after the other: pure, seeded, in token ids.

Prompts are ids and not text, so that their lengths are exact with every model. A session is told
each answer, because the next turn of a chat begins with it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

FIRST_ID = 300
"""Below are control tokens and bytes, in every tokenizer that we serve."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What the served model, and the patience of the user, allow."""

    vocab_size: int
    max_prompt_tokens: int
    output_tokens: int

    def __post_init__(self) -> None:
        """Checks that there is something to ask.

        Raises:
            ValueError: a size is too small.
        """
        if self.vocab_size <= FIRST_ID:
            raise ValueError(f"vocab_size must be above {FIRST_ID}, got {self.vocab_size}")
        if self.max_prompt_tokens < 16:
            raise ValueError(f"max_prompt_tokens must be at least 16, got {self.max_prompt_tokens}")
        if self.output_tokens < 1:
            raise ValueError(f"output_tokens must be at least 1, got {self.output_tokens}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """One request."""

    wait_s: float
    """Since the last answer, or since the start."""
    prompt_ids: tuple[int, ...]
    max_tokens: int


class Session(Protocol):
    """One user's behaviour; never ends."""

    def next_ask(self) -> Ask:
        """Says what comes next."""

    def take_answer(self, token_ids: Sequence[int]) -> None:
        """Takes the answer to the last ask; empty if it failed."""


def make_ids(seed: str, count: int, sizes: Sizes) -> tuple[int, ...]:
    """Returns tokens that are the same for the same seed, and share no prefix with others'."""
    rng = Random(seed)
    return tuple(rng.randrange(FIRST_ID, sizes.vocab_size) for _ in range(count))


class Chat:
    """A conversation: each turn sends all that was said before; 3 to 6 turns, then a new one."""

    def __init__(self, rng: Random, sizes: Sizes) -> None:
        """Begins the first conversation."""
        self._rng = rng
        self._sizes = sizes
        self._said: tuple[int, ...] = ()
        self._num_turns_left = 0

    def next_ask(self) -> Ask:
        """Says something new, after thinking."""
        sizes, rng = self._sizes, self._rng
        message = make_ids(str(rng.random()), rng.randint(8, 48), sizes)
        too_long = len(self._said) + len(message) > sizes.max_prompt_tokens
        if self._num_turns_left == 0 or too_long:
            self._num_turns_left = rng.randint(3, 6)
            self._said = ()
        self._num_turns_left -= 1
        self._said = (*self._said, *message)[-sizes.max_prompt_tokens :]
        wait_s = rng.expovariate(1.0)
        return Ask(wait_s=wait_s, prompt_ids=self._said, max_tokens=sizes.output_tokens)

    def take_answer(self, token_ids: Sequence[int]) -> None:
        """Remembers it."""
        self._said = (*self._said, *token_ids)


class LongDocument:
    """Three questions on a document that takes up most of the context, then another document."""

    def __init__(self, rng: Random, sizes: Sizes) -> None:
        """Has no document yet."""
        self._rng = rng
        self._sizes = sizes
        self._document: tuple[int, ...] = ()
        self._num_left = 0

    def next_ask(self) -> Ask:
        """Asks the next question."""
        sizes, rng = self._sizes, self._rng
        question_tokens = max(1, sizes.max_prompt_tokens // 16)
        if self._num_left == 0:
            self._num_left = 3
            share = rng.uniform(0.7, 0.9)
            count = int(sizes.max_prompt_tokens * share)
            self._document = make_ids(str(rng.random()), count, sizes)
        self._num_left -= 1
        question = make_ids(str(rng.random()), question_tokens, sizes)
        return Ask(
            wait_s=rng.expovariate(0.5),
            prompt_ids=(*self._document, *question),
            max_tokens=max(1, sizes.output_tokens // 2),
        )

    def take_answer(self, token_ids: Sequence[int]) -> None:
        """Needs none."""


class SharedPrompt:
    """One of four system prompts, the first of them most often, before a short question."""

    _WEIGHTS = (8, 4, 2, 1)

    def __init__(self, rng: Random, sizes: Sizes) -> None:
        """Knows the same system prompts as every other user."""
        self._rng = rng
        self._sizes = sizes
        count = sizes.max_prompt_tokens * 3 // 4
        self._prompts = [make_ids(f"system-{i}", count, sizes) for i in range(len(self._WEIGHTS))]

    def next_ask(self) -> Ask:
        """Asks something new of one of them."""
        sizes, rng = self._sizes, self._rng
        (system,) = rng.choices(self._prompts, self._WEIGHTS)
        question = make_ids(str(rng.random()), max(4, sizes.max_prompt_tokens // 8), sizes)
        return Ask(
            wait_s=rng.expovariate(2.0),
            prompt_ids=(*system, *question),
            max_tokens=sizes.output_tokens,
        )

    def take_answer(self, token_ids: Sequence[int]) -> None:
        """Needs none."""


class AgentTree:
    """An agent that tries branches: siblings share all that their parent said and got.

    It walks a tree of depth 3 with 3 children a node, depth first, and without thinking.
    """

    _DEPTH, _WIDTH = 3, 3

    def __init__(self, rng: Random, sizes: Sizes) -> None:
        """Begins with the tools that every agent has."""
        self._rng = rng
        self._sizes = sizes
        self._tools = make_ids("agent-tools", sizes.max_prompt_tokens // 4, sizes)
        self._stack: list[tuple[int, tuple[int, ...]]] = []
        self._asked: tuple[int, tuple[int, ...]] = (0, ())

    def next_ask(self) -> Ask:
        """Takes the next step of this tree, or the first of another."""
        sizes, rng = self._sizes, self._rng
        if not self._stack:
            task = make_ids(str(rng.random()), max(4, sizes.max_prompt_tokens // 8), sizes)
            self._stack = [(0, (*self._tools, *task))]
        depth, prefix = self._stack.pop()
        step = make_ids(str(rng.random()), max(2, sizes.max_prompt_tokens // 16), sizes)
        self._asked = depth, (*prefix, *step)[: sizes.max_prompt_tokens]
        return Ask(wait_s=0.0, prompt_ids=self._asked[1], max_tokens=sizes.output_tokens)

    def take_answer(self, token_ids: Sequence[int]) -> None:
        """Branches where there is room for more; a failed step has no children."""
        depth, prompt = self._asked
        prefix = (*prompt, *token_ids)
        if token_ids and depth < self._DEPTH and len(prefix) < self._sizes.max_prompt_tokens:
            self._stack += [(depth + 1, prefix)] * self._WIDTH


class Bursts:
    """Short requests whose gaps are Gamma-distributed: many at once, then long silence."""

    MEAN_GAP_S = 1.0
    _VARIATION = 4.0
    """Standard deviation over mean; 1 would be a Poisson process."""

    def __init__(self, rng: Random, sizes: Sizes) -> None:
        """Needs nothing else."""
        self._rng = rng
        self._sizes = sizes

    def next_ask(self) -> Ask:
        """Asks at once, most of the time."""
        sizes, rng = self._sizes, self._rng
        shape = self._VARIATION**-2
        count = rng.randint(8, max(8, sizes.max_prompt_tokens // 4))
        return Ask(
            wait_s=rng.gammavariate(shape, self.MEAN_GAP_S / shape),
            prompt_ids=make_ids(str(rng.random()), count, sizes),
            max_tokens=sizes.output_tokens,
        )

    def take_answer(self, token_ids: Sequence[int]) -> None:
        """Needs none."""


SESSIONS: Mapping[str, Callable[[Random, Sizes], Session]] = {
    "chat": Chat,
    "long-document": LongDocument,
    "shared-prompt": SharedPrompt,
    "agent-tree": AgentTree,
    "bursts": Bursts,
}
