"""Feeds the predictor with what replicas say their steps took: each report once."""

from collections.abc import Iterable

from autoscaler.figures import WorkerFigures
from pdserve.predictor.predictor import Predictor
from pdserve.request import Incarnation


class SampleFeed:
    """Remembers which reports were taken already: a reading may show the same one again.

    One thread.
    """

    def __init__(self, predictor: Predictor) -> None:
        """Has taken none."""
        self._predictor = predictor
        self._last: dict[str, tuple[Incarnation, int]] = {}

    def take(self, workers: Iterable[WorkerFigures]) -> None:
        """Observes what is new, under the class of each worker."""
        last = {}
        for worker in workers:
            before = self._last.get(worker.worker_id)
            if worker.life is None or not worker.report:
                # Unheard for a moment: its next report may be the one that was seen.
                if before is not None:
                    last[worker.worker_id] = before
                continue
            now = last[worker.worker_id] = (worker.life, worker.report)
            if now == before or not worker.worker_class:
                continue
            for sample in worker.samples:
                self._predictor.observe(worker.worker_class, worker.life, sample)
        self._last = last
