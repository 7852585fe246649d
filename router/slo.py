"""What a request wants: seconds to its first token and per token, and its priority."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pdserve.errors import ConfigError, InvalidField, Overloaded

MAX_PRIORITY = 9
_FIELDS = ("ttft_s", "tpot_s", "priority")


@dataclass(frozen=True, kw_only=True, slots=True)
class Slo:
    """None: nothing is wanted."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    priority: int = 0
    """0 to 9; smaller is served first."""


NO_SLO = Slo()


class TooLate(Overloaded):
    """The first token would come later than is wanted."""


class SloClasses:
    """The classes that the configuration names."""

    def __init__(self, classes: Mapping[str, Slo]) -> None:
        """Takes them by name."""
        self._classes = dict(classes)

    def find(
        self, name: str = "", *, ttft_s: float | None = None, tpot_s: float | None = None
    ) -> Slo:
        """Returns what a request wants: its class, and what it says itself in place of that.

        Raises:
            InvalidField: there is no such class, or a time is not positive.
        """
        slo = self._classes.get(name) if name else NO_SLO
        if slo is None:
            known = ", ".join(sorted(self._classes)) or "none is configured"
            raise InvalidField("slo_class", name, f"one of: {known}")
        for field, value in (("ttft_slo_s", ttft_s), ("tpot_slo_s", tpot_s)):
            if value is not None and not (0 < value < math.inf):
                raise InvalidField(field, value, "a positive number of seconds")
        return replace(
            slo,
            ttft_s=slo.ttft_s if ttft_s is None else ttft_s,
            tpot_s=slo.tpot_s if tpot_s is None else tpot_s,
        )


def parse_slo_classes(texts: Sequence[str]) -> SloClasses:
    """Reads `NAME=ttft_s:0.5,tpot_s:0.05,priority:1`, each part optional.

    Raises:
        ConfigError: one has another shape, or comes twice.
    """
    classes: dict[str, Slo] = {}
    for text in texts:
        name, _, rest = text.partition("=")
        if not name or name in classes:
            raise ConfigError(
                f"slo_classes must be NAME=ttft_s:S,tpot_s:S, each once, got {text!r}",
                settings=("slo_classes",),
            )
        values: dict[str, float] = {}
        for part in filter(None, rest.split(",")):
            field, _, value = part.partition(":")
            try:
                values[field] = float(value)
            except ValueError:
                raise ConfigError(
                    f"slo_classes: {part!r} in {text!r} is no number", settings=("slo_classes",)
                ) from None
            if field not in _FIELDS or not 0 <= values[field] < math.inf:
                raise ConfigError(
                    f"slo_classes: {part!r} in {text!r} must be one of {', '.join(_FIELDS)} "
                    "and a number of at least 0",
                    settings=("slo_classes",),
                )
        priority = int(values.get("priority", 0))
        if priority > MAX_PRIORITY:
            raise ConfigError(
                f"slo_classes: priority must be at most {MAX_PRIORITY}", settings=("slo_classes",)
            )
        classes[name] = Slo(
            ttft_s=values.get("ttft_s") or None,
            tpot_s=values.get("tpot_s") or None,
            priority=priority,
        )
    return SloClasses(classes)
