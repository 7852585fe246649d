"""Files that a command writes at its end: whether they can be is found out before the work."""

import os
import stat
from pathlib import Path

from pdserve.errors import ConfigError


def check_writable(flag: str, path: Path) -> None:
    """Tries whether a file can be written; it is left as it was.

    Args:
        flag: that names the file.
        path: where it is to be.

    Raises:
        ConfigError: it cannot be.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        _try_creation(flag, path)
        return
    except OSError as error:
        raise _refuse(flag, path, error) from error
    if stat.S_ISDIR(mode):
        raise ConfigError(f"{flag} must be a file, got the folder {path}")
    try:
        # Opening a pipe or a device may wait for somebody, or be seen by them.
        if stat.S_ISREG(mode):
            with path.open("ab"):
                pass
        elif not os.access(path, os.W_OK):
            raise PermissionError(0, "Permission denied")
    except OSError as error:
        raise _refuse(flag, path, error) from error


def write_output(flag: str, path: Path, text: str) -> None:
    """Writes a file.

    Raises:
        ConfigError: it cannot be, any more.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _refuse(flag, path, error) from error


def _try_creation(flag: str, path: Path) -> None:
    # The file itself, where the path is a link to what is not there yet.
    target = path.resolve()
    if not target.parent.is_dir():
        raise ConfigError(f"{flag} {path} cannot be written: there is no folder {target.parent}")
    try:
        # Only an attempt tells: root passes every check of permissions, and fails in /proc.
        target.open("xb").close()
        target.unlink()
    except OSError as error:
        raise _refuse(flag, path, error) from error


def _refuse(flag: str, path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{flag} {path} cannot be written: {error.strerror}")
