"""Reads the profiles that a predictor starts from."""

from collections.abc import Iterable
from pathlib import Path

from pdserve.errors import ConfigError
from pdserve.predictor.profile import Profile, profile_from_json


def read_profiles(paths: Iterable[str]) -> tuple[Profile, ...]:
    """Reads files.

    Raises:
        ConfigError: one cannot be read, or is no profile; the text names the file.
    """
    profiles = []
    for path in paths:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot read the profile {path}: {error.strerror}") from error
        except UnicodeDecodeError:
            raise ConfigError(f"the profile {path} is no text in UTF-8") from None
        profiles.append(profile_from_json(text, f"profile {path}"))
    return tuple(profiles)
