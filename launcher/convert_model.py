"""Converts a GGUF file in a process of its own: `python -m launcher.convert_model GGUF TARGET`.

The launcher itself never imports torch or gguf, and the conversion's memory goes back at its end.
"""

import sys
from pathlib import Path

from pdserve.errors import ConfigError
from pdserve.models.convert_gguf import convert_gguf


def main() -> int:
    """Converts argv[1] into the folder argv[2]; exits 2 with one line on a file it cannot read."""
    try:
        convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except Exception as error:  # noqa: BLE001 - this process's edge; damage has many names
        kind = type(error).__name__
        sys.stderr.write(f"{sys.argv[1]} cannot be converted: it may be damaged ({kind})\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
