"""Reads a client's trace id from its `traceparent` (W3C Trace Context, level 1)."""

import re
from collections.abc import Sequence
from typing import NewType

TraceId = NewType("TraceId", str)
"""32 lower-case hex digits, not all of them zero."""

_VERSION_00 = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")
_LATER = re.compile(r"(?!00|ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(?:-.*)?")
MAX_CHARACTERS = 512


def parse_traceparent(values: Sequence[str]) -> TraceId | None:
    """Returns the trace id; None when there is no header, two of them, or an invalid one.

    A later version may carry more behind what version 00 has (section 3.2.4). An invalid header is
    as good as none (section 3.2.2.3): no request fails for it.
    """
    if len(values) != 1 or len(values[0]) > MAX_CHARACTERS:
        return None
    # Blanks around a header's value are not part of it.
    text = values[0].strip(" \t")
    match = _VERSION_00.fullmatch(text) or _LATER.fullmatch(text)
    if match is None:
        return None
    trace_id, parent_id = match.groups()
    if not trace_id.strip("0") or not parent_id.strip("0"):
        return None
    return TraceId(trace_id)
