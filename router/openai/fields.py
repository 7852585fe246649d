"""Typed reading of one JSON object's fields; each refusal names the field.

`null` is the same as absent everywhere. Which fields were asked for is remembered, so that the
rest can be told apart.
"""

import json
from array import array
from collections.abc import Mapping

from pdserve.errors import InvalidField

INT32 = (-(2**31), 2**31 - 1)
UINT32 = (0, 2**32 - 1)
INT64 = (-(2**63), 2**63 - 1)


class JsonWord(str):
    """A word that stands in an error's text as it is, and not as a string in quotes."""

    __slots__ = ()

    __repr__ = str.__str__


def brief(value: object) -> object:
    """Returns a value short enough for an error's text, without looking into large ones.

    It is called as in JSON, which is what the client wrote.
    """
    if isinstance(value, str):
        return value[:65]
    if isinstance(value, list | dict):
        return JsonWord(f"{json_kind(value)} of {len(value)}")
    if value is None or isinstance(value, bool):
        return JsonWord(json.dumps(value))
    if isinstance(value, int) and value.bit_length() > 128:
        return JsonWord(f"a number of {value.bit_length()} bits")
    return value


def json_kind(value: object) -> JsonWord:
    """Returns what JSON calls the type of a parsed value."""
    match value:
        case None:
            return JsonWord("null")
        case bool():
            return JsonWord("boolean")
        case int() | float():
            return JsonWord("number")
        case str():
            return JsonWord("string")
        case list():
            return JsonWord("array")
        case _:
            return JsonWord("object")


class Fields:
    """One JSON object."""

    def __init__(self, values: Mapping[str, object], path: str = "") -> None:
        """Takes the object and where it stands in the body, such as `messages[0]`."""
        self._values = values
        self._path = path
        self._asked: set[str] = set()

    def path_of(self, name: str) -> str:
        """Returns a field's name as an error shows it."""
        return f"{self._path}.{name}" if self._path else name

    def unread(self) -> list[str]:
        """Returns the names of fields that nobody has asked for, but for those that are null."""
        return [
            name
            for name, value in self._values.items()
            if name not in self._asked and value is not None
        ]

    @property
    def asked(self) -> frozenset[str]:
        """The names that were asked for."""
        return frozenset(self._asked)

    def has(self, name: str) -> bool:
        """Says whether a field is there and not null."""
        return self.raw(name) is not None

    def raw(self, name: str) -> object:
        """Returns a field as it is; None when absent."""
        self._asked.add(name)
        return self._values.get(name)

    def text(self, name: str) -> str | None:
        """Reads a string."""
        value = self.raw(name)
        return None if value is None else as_text(self.path_of(name), value)

    def flag(self, name: str) -> bool | None:
        """Reads true or false."""
        value = self.raw(name)
        if value is None or isinstance(value, bool):
            return value
        raise InvalidField(self.path_of(name), brief(value), "true or false")

    def number(self, name: str) -> float | None:
        """Reads a number."""
        value = self.raw(name)
        return None if value is None else as_number(self.path_of(name), value)

    def whole(self, name: str, bounds: tuple[int, int] = INT32) -> int | None:
        """Reads a whole number that fits the wire; its real limits are checked later."""
        value = self.raw(name)
        return None if value is None else as_whole(self.path_of(name), value, bounds)

    def items(self, name: str, max_items: int) -> list[object] | None:
        """Reads a list of at most so many entries."""
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, list):
            raise InvalidField(self.path_of(name), brief(value), "a list")
        if len(value) > max_items:
            raise InvalidField(self.path_of(name), len(value), f"at most {max_items} entries")
        return value

    def inner(self, name: str) -> "Fields | None":
        """Reads an object."""
        value = self.raw(name)
        return None if value is None else as_fields(self.path_of(name), value)


def as_text(path: str, value: object) -> str:
    """Checks for a string of valid Unicode."""
    if not isinstance(value, str):
        raise InvalidField(path, brief(value), "a string")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InvalidField(path, "half a surrogate pair", "valid Unicode") from None
    return value


def as_number(path: str, value: object) -> float:
    """Checks for a number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidField(path, brief(value), "a number")
    try:
        return float(value)
    except OverflowError:
        raise InvalidField(path, brief(value), "a number in range") from None


def as_whole(path: str, value: object, bounds: tuple[int, int]) -> int:
    """Checks for a whole number in bounds."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidField(path, brief(value), "a whole number")
    low, high = bounds
    if not low <= value <= high:
        raise InvalidField(path, brief(value), f"from {low} to {high}")
    return value


def as_fields(path: str, value: object) -> Fields:
    """Checks for an object."""
    if not isinstance(value, dict):
        raise InvalidField(path, brief(value), "an object")
    return Fields(value, path)


def as_ids(path: str, values: list[object]) -> list[int]:
    """Checks a list of token ids; a long list passes at the speed of C."""
    if set(map(type, values)) <= {int}:
        ids: list[int] = values  # type: ignore[assignment]  # every entry is an int, see above
        try:
            array("I", ids)
        except OverflowError:
            pass  # the first bad one is named below
        else:
            return ids
    return [as_whole(f"{path}[{position}]", value, UINT32) for position, value in enumerate(values)]
