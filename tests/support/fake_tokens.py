"""The tokens of fake workers: each is a pure function of all tokens before it."""

import zlib
from array import array
from collections.abc import Sequence

FIRST_PLAIN_ID = 3
VOCAB_SIZE = 384


def next_token(history: Sequence[int], sample_index: int = 0) -> int:
    """Returns the token after a history; never a special one."""
    digest = zlib.crc32(array("I", history).tobytes(), sample_index)
    return FIRST_PLAIN_ID + digest % (VOCAB_SIZE - FIRST_PLAIN_ID)


def expected_tokens(prompt: Sequence[int], count: int, sample_index: int = 0) -> list[int]:
    """Returns what an undisturbed run makes."""
    history = list(prompt)
    for _ in range(count):
        history.append(next_token(history, sample_index))
    return history[len(prompt) :]
