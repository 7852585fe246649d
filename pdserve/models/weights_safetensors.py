"""Reads weights from safetensors files, mapped into memory. Pickled files are refused."""

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from pdserve.errors import ConfigError
from pdserve.models.folder import list_weight_files

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


class SafetensorsWeights:
    """The tensors of a model folder: one file, or shards with an index."""

    def __init__(self, folder: Path) -> None:
        """Finds out which file holds which tensor.

        Raises:
            ConfigError: there are no safetensors files, or one is broken or missing.
        """
        self._folder = folder
        self._file_of = _read_names(folder)

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Returns a tensor that views the mapped file.

        Raises:
            ConfigError: there is no such tensor, or its shape differs.
        """
        path = self._file_of.get(name)
        if path is None:
            raise ConfigError(f"{self._folder}: tensor {name} is missing")
        try:
            with safe_open(path, framework="pt") as file:
                tensor: Tensor = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path}: tensor {name} cannot be read: {error}") from None
        if tuple(tensor.shape) != shape:
            raise ConfigError(
                f"{path}: tensor {name} must have shape {list(shape)}, got {list(tensor.shape)}"
            )
        return tensor


def _read_names(folder: Path) -> dict[str, Path]:
    index = folder / INDEX_NAME
    if index.is_file():
        return _read_index(index)
    single = folder / SINGLE_NAME
    if single.is_file():
        return dict.fromkeys(_names_in(single), single)
    if list_weight_files(folder):
        raise ConfigError(f"{folder}: neither {SINGLE_NAME} nor {INDEX_NAME}")
    pickled = sorted(
        path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern)
    )
    if pickled:
        raise ConfigError(
            f"{folder}: {pickled[0]} is a pickle, which may run code when loaded; "
            "convert the model to safetensors"
        )
    raise ConfigError(f"{folder}: no {SINGLE_NAME}")


def _read_index(index: Path) -> dict[str, Path]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        file_of = {str(name): index.parent / str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index}: cannot be read: {error!r}") from None
    for path in sorted(set(file_of.values())):
        if path.parent != index.parent or not path.is_file():
            raise ConfigError(f"{index}: shard {path.name} is missing")
        absent = {name for name, file in file_of.items() if file == path} - set(_names_in(path))
        if absent:
            raise ConfigError(f"{path}: tensor {min(absent)} is missing")
    return file_of


def _names_in(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path}: is no safetensors file: {error}") from None
