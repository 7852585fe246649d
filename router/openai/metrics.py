"""Counts HTTP answers; labels come from fixed sets, never from a client."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter

OTHER = "other"


class HttpMetrics:
    """The series of the HTTP front."""

    def __init__(
        self, registry: CollectorRegistry, paths: Iterable[str], engine: str = "0"
    ) -> None:
        """Registers the series; a path that is not in `paths` counts as `other`."""
        self._paths = frozenset(paths)
        self._engine = engine
        self._answers = Counter(
            "pdserve_http_answers",
            "HTTP answers begun.",
            ("engine", "path", "status"),
            registry=registry,
        )

    def note_answer(self, path: str, status: int) -> None:
        """Counts an answer by its route and status."""
        shown = path if path in self._paths else OTHER
        self._answers.labels(self._engine, shown, str(status)).inc()
