"""Typed access to the fields of a GGUF file."""

from pathlib import Path

import numpy as np
from gguf import GGUFReader

from pdserve.errors import ConfigError


class GgufMetadata:
    """Typed access to the fields of a GGUF file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.reader = GGUFReader(path)
        except (OSError, ValueError, IndexError, KeyError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is cut short or damaged"
            raise ConfigError(f"{path} is no readable GGUF file: {reason}") from None
        self.architecture = self.text("general.architecture")

    def find(self, name: str) -> object | None:
        """Returns a field's value, or None if the file has no such field."""
        field = self.reader.get_field(name)
        try:
            value: object = None if field is None else field.contents()
        except (ValueError, IndexError) as error:
            raise ConfigError(f"{self.path}: field {name} is damaged") from error
        return value

    def get(self, name: str) -> object:
        """Returns a field's value."""
        value = self.find(name)
        if value is None:
            raise ConfigError(f"{self.path}: field {name} is missing")
        return value

    def text(self, name: str) -> str:
        """Returns a string."""
        return str(self.get(name))

    def number(self, name: str, default: int | None = None) -> int:
        """Returns an integer field of the architecture."""
        field = f"{self.architecture}.{name}"
        value = self.get(field) if default is None else self.find(field)
        if value is None:
            value = default
        if not isinstance(value, int):
            raise ConfigError(f"{self.path}: {name} must be an integer, got {value!r}")
        return value

    def real(self, name: str, default: float | None = None) -> float:
        """Returns a float32 field of the architecture as the decimal it was meant to be."""
        field = f"{self.architecture}.{name}"
        value = self.find(field) if default is not None else self.get(field)
        if value is None:
            value = default
        if not isinstance(value, int | float):
            raise ConfigError(f"{self.path}: {name} must be a number, got {value!r}")
        return float(str(np.float32(value)))

    def token_id(self, name: str) -> int | None:
        """Returns one of the tokenizer's special ids, if the file has it."""
        value = self.find(f"tokenizer.ggml.{name}")
        return value if isinstance(value, int) else None

    def sequence(self, name: str) -> list[object]:
        """Returns an array field."""
        value = self.get(name)
        if not isinstance(value, list):
            raise ConfigError(f"{self.path}: {name} must be an array")
        return value
