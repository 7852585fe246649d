"""Lines for whoever watches; a process goes on when nobody does any more."""

import os
from typing import TextIO


def write_line(stream: TextIO, line: str) -> None:
    """Writes one line at once; into nothing from the time on that the reader is gone."""
    try:
        stream.write(f"{line}\n")
        stream.flush()
    except BrokenPipeError:
        turn_off(stream)


def turn_off(stream: TextIO) -> None:
    """Lets a stream lead nowhere, what it still holds included.

    Python would otherwise fail when it flushes the stream at the end, and exit with status 120.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, stream.fileno())
    finally:
        os.close(nowhere)
