"""Logs as JSON lines: a constant message, fields from `extra`, no content of requests."""

import json
import logging
import re
import sys
import time
from collections.abc import Mapping
from typing import TextIO

from pdserve.config.log_level import LogLevel
from pdserve.line_output import turn_off

MAX_ID_CHARACTERS = 128
MAX_VALUE_CHARACTERS = 2048

_UNSAFE = re.compile(r"[^A-Za-z0-9._:/@-]")
_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def safe_id(text: str) -> str:
    """Returns at most 128 characters of [A-Za-z0-9._:/@-]; others become `_`."""
    return _UNSAFE.sub("_", text[:MAX_ID_CHARACTERS])


class JsonFormatter(logging.Formatter):
    """One JSON object a line; control characters are escaped, so no line can be forged."""

    def __init__(self, fields: Mapping[str, str]) -> None:
        """Takes fields that stand in every line, such as the worker's id."""
        super().__init__()
        self._fields = dict(fields)

    def format(self, record: logging.LogRecord) -> str:
        """Renders a record."""
        line: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage()[:MAX_VALUE_CHARACTERS],
            **self._fields,
        }
        for name, value in vars(record).items():
            if name not in _STANDARD_FIELDS:
                line[name] = _shorten(name, value)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)[-8 * MAX_VALUE_CHARACTERS :]
        return json.dumps(line, ensure_ascii=True, default=str)


def _shorten(name: str, value: object) -> object:
    if isinstance(value, str):
        return safe_id(value) if name.endswith("_id") else value[:MAX_VALUE_CHARACTERS]
    if isinstance(value, list | tuple):
        return [_shorten(name, part) for part in value[:64]]
    if isinstance(value, int | float | bool) or value is None:
        return value
    return str(value)[:MAX_VALUE_CHARACTERS]


class LineHandler(logging.StreamHandler[TextIO]):
    """Writes to a stream until its reader is gone, and then nowhere."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Called with the error that `emit` met."""
        if isinstance(sys.exc_info()[1], BrokenPipeError):
            turn_off(self.stream)
        else:
            super().handleError(record)


def configure_logging(
    level: LogLevel = "info", fields: Mapping[str, str] | None = None, stream: TextIO | None = None
) -> None:
    """Sends this process's logs as JSON lines to one stream (stderr); called once, at start."""
    handler = LineHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(fields or {}))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
