"""How much a process logs."""

from typing import Literal

LogLevel = Literal["debug", "info", "warning", "error"]
