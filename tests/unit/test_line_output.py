"""Lines whose reader has gone."""

import logging
import os
import subprocess
import sys

from pdserve.line_output import write_line
from pdserve.log import configure_logging


def test_lines_after_the_reader_has_gone_are_lost_and_nothing_else() -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        write_line(stream, "first")
        assert os.read(reader, 64) == b"first\n"
        os.close(reader)
        for _ in range(3000):
            write_line(stream, "nobody reads this")


def test_logs_whose_reader_has_gone_end_nothing(capsys) -> None:  # type: ignore[no-untyped-def]
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    reader, writer = os.pipe()
    try:
        with os.fdopen(writer, "w") as stream:
            configure_logging("info", stream=stream)
            os.close(reader)
            for _ in range(300):
                logging.getLogger("test").info("nobody reads this")
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    assert capsys.readouterr().err == ""


def test_a_process_whose_reader_has_gone_ends_well() -> None:
    program = """
import sys
from pdserve.line_output import write_line
write_line(sys.stdout, "first")
sys.stdin.read(1)
for _ in range(3000):
    write_line(sys.stdout, "nobody reads this")
    write_line(sys.stderr, "nor this")
"""
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stderr is not None
        assert child.stdout.readline() == b"first\n"
        child.stdout.close()
        child.stderr.close()
        child.stdin.write(b"x")
        child.stdin.close()
        assert child.wait(timeout=60) == 0
