"""Predicts how long steps and transfers will take, from those that were.

One predictor serves routing, admission, autoscaling and simulation. It is fitted for each class of
workers (and of links), starts from a profile if there is one, and drops the first samples of every
worker's life: compiling, capturing and cold caches say nothing of what comes.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from pdserve.predictor.linear_fit import LinearFit
from pdserve.predictor.profile import Profile
from pdserve.request import Incarnation

NUM_WARM_UP_SAMPLES = 5
"""Of each kind and each worker's life."""
MIN_SAMPLES = 16
HALF_LIFE_SAMPLES = 400.0
MAX_KNOWN_LIVES = 8192
PROFILE_SAMPLES = 32
"""A profile weighs as much as so many samples."""
_NO_TIME_S = 1e-9
"""What something takes that takes no time: errors are relative to it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillSample:
    """A step that computed nothing but one piece of a prompt."""

    num_tokens: int
    num_context_tokens: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeSample:
    """A step that computed one token for each of some sequences."""

    num_sequences: int
    num_kv_tokens: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferSample:
    """A hand-off, from its first byte to the last."""

    num_bytes: int
    seconds: float


Sample = PrefillSample | DecodeSample | TransferSample


@dataclass(frozen=True, kw_only=True, slots=True)
class FitQuality:
    """How good a law is."""

    worker_class: str
    kind: str
    num_samples: int
    mean_error: float
    """Relative: 0.1 is ten per cent."""


class Predictor:
    """Laws of all classes of workers and links. One thread."""

    def __init__(self, profiles: Iterable[Profile] = ()) -> None:
        """Starts from profiles; what they do not name is unknown until it was seen."""
        self._fits: dict[tuple[str, type[Sample]], LinearFit] = {}
        self._lives: OrderedDict[tuple[Incarnation, type[Sample]], int] = OrderedDict()
        for profile in profiles:
            self._start_from(profile)

    def observe(self, worker_class: str, life: Incarnation, sample: Sample) -> None:
        """Takes what a worker measured.

        Args:
            worker_class: of the worker; for a transfer, of the link.
            life: the worker's incarnation.
            sample: what it measured.
        """
        if sample.seconds <= 0 or self._is_warming_up(life, type(sample)):
            return
        fit = self._fit(worker_class, type(sample))
        fit.observe(_terms(sample), sample.seconds)

    def prefill_s(
        self, worker_class: str, num_tokens: float, num_context_tokens: float = 0
    ) -> float | None:
        """Returns the seconds that a piece of a prompt takes; None while nothing is known."""
        terms = _prefill_terms(num_tokens, num_context_tokens)
        return self._predict(worker_class, PrefillSample, terms)

    def decode_step_s(
        self, worker_class: str, num_sequences: float, num_kv_tokens: float
    ) -> float | None:
        """Returns the seconds of a step of decoding; None while nothing is known."""
        return self._predict(worker_class, DecodeSample, (1.0, num_sequences, num_kv_tokens))

    def transfer_s(self, link_class: str, num_bytes: float) -> float | None:
        """Returns the seconds of a hand-off's bytes; None while nothing is known."""
        return self._predict(link_class, TransferSample, (1.0, num_bytes))

    def law(self, worker_class: str, kind: type[Sample]) -> tuple[float, ...] | None:
        """Returns the coefficients of a law, in the order of `Profile`; None while unknown."""
        fit = self._fits.get((worker_class, kind))
        return fit.coefficients if fit is not None and fit.is_fitted else None

    def qualities(self) -> tuple[FitQuality, ...]:
        """Returns how good each law is, for metrics."""
        return tuple(
            FitQuality(
                worker_class=worker_class,
                kind=_KINDS[kind],
                num_samples=fit.num_samples,
                mean_error=fit.mean_error,
            )
            for (worker_class, kind), fit in sorted(
                self._fits.items(), key=lambda item: (item[0][0], _KINDS[item[0][1]])
            )
        )

    def _predict(
        self, worker_class: str, kind: type[Sample], terms: tuple[float, ...]
    ) -> float | None:
        fit = self._fits.get((worker_class, kind))
        if fit is None or not fit.is_fitted:
            return None
        return fit.predict(terms)

    def _fit(self, worker_class: str, kind: type[Sample]) -> LinearFit:
        fit = self._fits.get((worker_class, kind))
        if fit is None:
            num_terms = 2 if kind is TransferSample else 3
            fit = LinearFit(num_terms, min_samples=MIN_SAMPLES, half_life_samples=HALF_LIFE_SAMPLES)
            self._fits[worker_class, kind] = fit
        return fit

    def _is_warming_up(self, life: Incarnation, kind: type[Sample]) -> bool:
        seen = self._lives.pop((life, kind), 0)
        self._lives[life, kind] = min(seen + 1, NUM_WARM_UP_SAMPLES + 1)
        if len(self._lives) > MAX_KNOWN_LIVES:
            self._lives.popitem(last=False)
        return seen < NUM_WARM_UP_SAMPLES

    def _start_from(self, profile: Profile) -> None:
        """Takes a grid of points of the profile's laws as samples."""
        samples: list[Sample] = []
        for step in range(PROFILE_SAMPLES):
            size = 2 ** (step % 8)
            tokens, context = 32 * size, 1024 * (step // 8)
            sequences, kv_tokens = size, size * 512 * (1 + step // 8)
            num_bytes = tokens * profile.kv_bytes_per_token
            samples += (
                PrefillSample(
                    num_tokens=tokens,
                    num_context_tokens=context,
                    seconds=profile.prefill_s(tokens, context),
                ),
                DecodeSample(
                    num_sequences=sequences,
                    num_kv_tokens=kv_tokens,
                    seconds=profile.decode_step_s(sequences, kv_tokens),
                ),
                TransferSample(num_bytes=num_bytes, seconds=profile.transfer_s(num_bytes)),
            )
        for sample in samples:
            fit = self._fit(profile.worker_class, type(sample))
            fit.observe(_terms(sample), max(sample.seconds, _NO_TIME_S))


def _terms(sample: Sample) -> tuple[float, ...]:
    match sample:
        case PrefillSample():
            return _prefill_terms(sample.num_tokens, sample.num_context_tokens)
        case DecodeSample():
            return (1.0, sample.num_sequences, sample.num_kv_tokens)
        case TransferSample():
            return (1.0, sample.num_bytes)


def _prefill_terms(num_tokens: float, num_context_tokens: float) -> tuple[float, ...]:
    return (1.0, num_tokens, num_tokens * (num_context_tokens + num_tokens / 2))


_KINDS: dict[type[Sample], str] = {
    PrefillSample: "prefill",
    DecodeSample: "decode",
    TransferSample: "transfer",
}
