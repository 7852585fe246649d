"""Names of models on the Hugging Face hub: `org/name`, or `org/name@revision`."""

import re
from dataclasses import dataclass
from typing import Self

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_HUB_ID = re.compile(rf"({_NAME}/{_NAME})(?:@([A-Za-z0-9._/-]+))?")


@dataclass(frozen=True, kw_only=True, slots=True)
class HubModel:
    """A repository of the hub."""

    repository: str
    revision: str | None = None
    """A branch, tag or commit; None is the main branch."""

    @classmethod
    def parse(cls, name: str) -> Self | None:
        """Reads `org/name[@revision]`; None if the name has another form."""
        match = _HUB_ID.fullmatch(name)
        return None if match is None else cls(repository=match[1], revision=match[2])
