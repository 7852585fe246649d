"""What a benchmark of kernels measured; one failing variant does not end it."""

import json
import os
import traceback
from collections.abc import Callable
from pathlib import Path


class Record:
    """Values by section and key, shown at the end and written as JSON."""

    def __init__(self) -> None:
        self.values: dict[str, dict[str, object]] = {}

    def run(self, section: str, key: str, job: Callable[[], object]) -> float | None:
        """Keeps what a job returns; its error is shown and kept instead, and the rest goes on.

        Returns:
            The value if it is a number.
        """
        try:
            value = job()
        except Exception as error:  # noqa: BLE001 - the rest of the table is still wanted
            last = traceback.format_exc().strip().splitlines()[-3:]
            print(f"FAILED {section} {key}: {type(error).__name__} {str(error)[:200]} {last}")
            value = f"{type(error).__name__}: {str(error)[:200]}"
        self.values.setdefault(section, {})[key] = value
        return float(value) if isinstance(value, int | float) else None

    def write(self, name: str) -> None:
        """Writes all values to `$OUT/<name>.json`, or here."""
        folder = Path(os.environ.get("OUT", "."))
        (folder / f"{name}.json").write_text(json.dumps(self.values, indent=1, default=str))


def show(value: float | None, digits: int = 1) -> str:
    """Returns a cell of a table."""
    return "-" if value is None else f"{value:.{digits}f}"
