"""Lines of a trace's file, plain or gzipped, and refusals that name file, line and field."""

import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pdserve.errors import ConfigError

MOST = 2**31 - 1
"""Of tokens and names of blocks."""
MOST_TIMESTAMP_S = 1e11
"""Beyond the year 5000, whenever a trace's time began."""
_MOST_LINE_BYTES = 16 << 20
_GZIP_BEGINNING = b"\x1f\x8b"
_WHOLE_NUMBER = re.compile(r"-?[0-9]{1,20}")
_SHOWN = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceLine:
    """One line that says something."""

    path: Path
    number: int
    """From 1."""
    text: str

    def refuse(self, text: str) -> ConfigError:
        """Returns what to raise where the line cannot be so."""
        return ConfigError(f"trace {self.path}, line {self.number}: {text}", settings=("trace",))

    def refuse_value(self, what: str, wanted: str, value: object) -> ConfigError:
        """Returns what to raise for a field, or the whole line, that must be something else."""
        return self.refuse(f"{what} must be {wanted}, got {_show(value)}")

    def read_object(self) -> dict[str, object]:
        """Reads the line as JSON.

        Raises:
            ConfigError: it is none, or no object.
        """
        try:
            row: object = json.loads(self.text)
        except (ValueError, RecursionError):
            raise self.refuse_value("it", "one JSON object", self.text) from None
        if not isinstance(row, dict):
            raise self.refuse_value("it", "one JSON object", row)
        return row

    def read_count(self, field: str, value: object, *, least: int = 0) -> int:
        """Checks a whole number.

        Raises:
            ConfigError: it is none, or out of range.
        """
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST:
            raise self.refuse_value(field, f"a whole number from {least} to {MOST}", value)
        return value

    def read_text_count(self, field: str, text: str, *, least: int = 0) -> int:
        """Reads a whole number of a CSV file.

        Raises:
            ConfigError: it is none, or out of range.
        """
        is_whole = _WHOLE_NUMBER.fullmatch(text.strip())
        return self.read_count(field, int(text) if is_whole else text, least=least)

    def read_time_s(self, field: str, value: object, *, per_s: int) -> float:
        """Checks a time that is counted in so many parts of a second.

        Raises:
            ConfigError: it is no number, not finite, or beyond all calendars.
        """
        most = MOST_TIMESTAMP_S * per_s
        # NaN is within no limits.
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not -most <= value <= most
        ):
            raise self.refuse_value(field, f"a number from {-most:g} to {most:g}", value)
        return value / per_s


def read_lines(path: Path) -> Iterator[TraceLine]:
    """Yields what is not blank; whether the file is gzipped is seen from its first bytes.

    Raises:
        ConfigError: the file cannot be read, or is no text.
    """
    number = 0
    try:
        with path.open("rb") as raw:
            is_gzipped = raw.peek(2).startswith(_GZIP_BEGINNING)
            file: io.BufferedIOBase = gzip.GzipFile(fileobj=raw) if is_gzipped else raw
            while line := file.readline(_MOST_LINE_BYTES):
                number += 1
                text = _decode(path, number, line).strip()
                if text:
                    yield TraceLine(path=path, number=number, text=text)
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise ConfigError(
            f"trace {path} cannot be read: its gzip data is damaged or cut off behind line "
            f"{number}",
            settings=("trace",),
        ) from None
    except OSError as error:
        raise ConfigError(
            f"trace {path} cannot be read: {error.strerror}", settings=("trace",)
        ) from error


def _decode(path: Path, number: int, line: bytes) -> str:
    place = TraceLine(path=path, number=number, text="")
    if len(line) == _MOST_LINE_BYTES:
        raise place.refuse(f"it is longer than {_MOST_LINE_BYTES} bytes: this is no trace")
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError:
        raise place.refuse("it is no text in UTF-8") from None


def _show(value: object) -> str:
    """Shows a value as whoever wrote the file knows it, and no more than fits a line."""
    if isinstance(value, dict | list):
        kind = "an object" if isinstance(value, dict) else "a list"
        return f"{kind} of {len(value)}"
    if isinstance(value, str):
        return repr(value[:_SHOWN])
    return json.dumps(value)[:_SHOWN]
