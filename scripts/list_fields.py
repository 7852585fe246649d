"""Writes the table of HTTP request fields in docs/http.md; `--check` says if it is stale."""

import json
import sys
from pathlib import Path

from router.openai.compatibility import IGNORED, REFUSED, SUPPORTED

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "http.md"
BEGIN = "<!-- fields: made by `make fields` -->\n"
END = "<!-- end of fields -->\n"


def field_table() -> str:
    """Returns the table, one line per field."""
    paths = list(SUPPORTED)
    names = sorted({*IGNORED, *REFUSED, *(name for names in SUPPORTED.values() for name in names)})
    lines = [f"| Field | {' | '.join(f'`{path}`' for path in paths)} |", "| --- | --- | --- |"]
    lines += [
        f"| `{name}` | {' | '.join(_state(name, path) for path in paths)} |" for name in names
    ]
    return "\n".join(lines) + "\n"


def _state(name: str, path: str) -> str:
    if name in SUPPORTED[path]:
        return "supported"
    if name in IGNORED:
        return "ignored"
    if name not in REFUSED:
        return "unknown"
    neutral = " or ".join(f"`{json.dumps(value)}`" for value in REFUSED[name])
    return f"refused, but for {neutral}" if neutral else "refused"


def main() -> int:
    """Writes or checks."""
    text = DOCUMENT.read_text(encoding="utf-8")
    start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    fresh = text[:start] + field_table() + text[end:]
    if "--check" in sys.argv:
        if fresh != text:
            print("docs/http.md is stale: run `make fields`")
        return int(fresh != text)
    DOCUMENT.write_text(fresh, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
