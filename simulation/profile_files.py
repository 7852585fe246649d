"""Finds a profile: a file of the user's, or one that comes with the project."""

import os
from pathlib import Path

from pdserve.errors import ConfigError
from pdserve.predictor.profile import Profile
from pdserve.predictor.profile_files import read_profiles

SHIPPED = Path(__file__).parent / "profiles"


def list_profiles() -> tuple[str, ...]:
    """Names what comes with the project."""
    return tuple(sorted(path.stem for path in SHIPPED.glob("*.json")))


def find_profile(name: str, model: str) -> Profile:
    """Reads a profile.

    Args:
        name: a file; or a device, of which there is a profile for the model; or a profile's name.
        model: that it must be of.

    Raises:
        ConfigError: there is none, it cannot be read, or it is another model's.
    """
    shipped = [SHIPPED / f"{name}-{model}.json", SHIPPED / f"{name}.json"]
    # Unlike Path's, it says no to what is too long for a name.
    path = next((one for one in [Path(name), *shipped] if os.path.isfile(one)), None)
    if path is None:
        known = ", ".join(list_profiles())
        raise ConfigError(
            f"gpu: there is no profile {name!r} for model {model!r}; `pdserve profile` measures "
            f"one; with the project come: {known}",
            settings=("gpu",),
        )
    try:
        (profile,) = read_profiles((str(path),))
    except ConfigError as error:
        raise ConfigError(f"gpu: {error}", settings=("gpu",)) from error
    measured = profile.detail.get("model")
    if measured is not None and measured != model:
        raise ConfigError(
            f"gpu: profile {path} is of model {measured}, not of {model}", settings=("gpu",)
        )
    return profile
