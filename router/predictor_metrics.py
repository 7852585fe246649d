"""How well steps are predicted, as series."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Gauge

from pdserve.predictor.predictor import FitQuality
from router.metrics import LABELS


class PredictorMetrics:
    """The predictor's laws in one registry."""

    def __init__(self, registry: CollectorRegistry, model_name: str, engine: str) -> None:
        """Registers the series."""
        self._values = (model_name, engine, "router")
        law = (*LABELS, "worker_class", "kind")
        self._error = Gauge(
            "pdserve_predictor_error", "Mean relative error of a law.", law, registry=registry
        )
        self._samples = Gauge(
            "pdserve_predictor_samples", "Steps that a law was fitted to.", law, registry=registry
        )

    def note(self, qualities: Iterable[FitQuality]) -> None:
        """Sets what is known of the laws."""
        for one in qualities:
            labels = (*self._values, one.worker_class, one.kind)
            self._error.labels(*labels).set(one.mean_error)
            self._samples.labels(*labels).set(one.num_samples)
