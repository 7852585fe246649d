"""A linear law with coefficients of at least zero, fitted to a stream of samples.

    y = c[0] * x[0] + c[1] * x[1] + ...,   c >= 0

Least squares over relative residuals (1 - prediction / y), so that a step of a millisecond counts
as much as one of a second; old samples fade. With so few coefficients the bound at zero is met by
trying every subset of them (Lawson and Hanson, 1974, chapter 23, without their search order).
"""

from collections.abc import Sequence
from itertools import combinations

OUTLIER_RATIO = 3.0
"""A sample that is off by more than this factor counts little: the process was held up."""
OUTLIER_WEIGHT = 0.02
_SINGULAR = 1e-9


class LinearFit:
    """Coefficients over samples that fade. One thread."""

    def __init__(self, num_terms: int, *, min_samples: int, half_life_samples: float) -> None:
        """Knows nothing.

        Args:
            num_terms: of the law.
            min_samples: so many make it fitted.
            half_life_samples: after so many more, a sample weighs half.
        """
        assert num_terms >= 1
        self._min_samples = min_samples
        self._keep = 0.5 ** (1.0 / half_life_samples)
        self._products = [[0.0] * num_terms for _ in range(num_terms)]
        self._targets = [0.0] * num_terms
        self._coefficients: tuple[float, ...] | None = None
        self.num_samples = 0
        self.mean_error = 0.0
        """Mean relative error of predictions made before their sample came; fades as samples do."""

    @property
    def is_fitted(self) -> bool:
        """True once there were enough samples."""
        return self.num_samples >= self._min_samples

    @property
    def coefficients(self) -> tuple[float, ...]:
        """The law, as of now."""
        if self._coefficients is None:
            self._coefficients = _solve(self._products, self._targets)
        return self._coefficients

    def predict(self, terms: Sequence[float]) -> float:
        """Returns y; of use once it is fitted."""
        return sum(c * x for c, x in zip(self.coefficients, terms, strict=True))

    def observe(self, terms: Sequence[float], y: float, weight: float = 1.0) -> None:
        """Takes a sample.

        Args:
            terms: x, each of at least zero.
            y: what was measured, above zero.
            weight: of the sample.
        """
        assert y > 0
        if self.is_fitted:
            predicted = self.predict(terms)
            if not y / OUTLIER_RATIO <= predicted <= y * OUTLIER_RATIO:
                weight *= OUTLIER_WEIGHT
            error = abs(predicted - y) / y
            rate = 1.0 / min(self.num_samples, 50)
            self.mean_error += rate * (min(error, OUTLIER_RATIO) - self.mean_error)
        scaled = [x / y for x in terms]
        for row, x in zip(self._products, scaled, strict=True):
            for column, other in enumerate(scaled):
                row[column] = row[column] * self._keep + weight * x * other
        self._targets = [
            old * self._keep + weight * x for old, x in zip(self._targets, scaled, strict=True)
        ]
        self.num_samples += 1
        self._coefficients = None


def _solve(products: list[list[float]], targets: list[float]) -> tuple[float, ...]:
    """Returns the coefficients of the least loss among those that are all at least zero."""
    count = len(targets)
    whole = _solve_exactly(products, targets)
    if whole is not None and min(whole) >= 0:
        # The least loss of all, and within the bounds: no subset has less.
        return tuple(whole)
    best, best_gain = (0.0,) * count, 0.0
    for size in range(1, count):
        for chosen in combinations(range(count), size):
            part = _solve_exactly(
                [[products[i][j] for j in chosen] for i in chosen], [targets[i] for i in chosen]
            )
            if part is None or min(part) < 0:
                continue
            # At the minimum of a subset the loss is (constant - targets . coefficients).
            gain = sum(c * targets[i] for c, i in zip(part, chosen, strict=True))
            if gain > best_gain * (1 + 1e-12):
                full = [0.0] * count
                for c, i in zip(part, chosen, strict=True):
                    full[i] = c
                best, best_gain = tuple(full), gain
    return best


def _solve_exactly(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Solves by Gauss's elimination after scaling to a unit diagonal; None if it is singular."""
    count = len(right)
    scales = [matrix[i][i] ** 0.5 for i in range(count)]
    if min(scales) <= 0:
        return None
    rows = [
        [matrix[i][j] / (scales[i] * scales[j]) for j in range(count)] + [right[i] / scales[i]]
        for i in range(count)
    ]
    for i in range(count):
        pivot = max(range(i, count), key=lambda row: abs(rows[row][i]))
        if abs(rows[pivot][i]) < _SINGULAR:
            return None
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for below in range(i + 1, count):
            factor = rows[below][i] / rows[i][i]
            rows[below] = [a - factor * b for a, b in zip(rows[below], rows[i], strict=True)]
    answer = [0.0] * count
    for i in reversed(range(count)):
        rest = sum(rows[i][j] * answer[j] for j in range(i + 1, count))
        answer[i] = (rows[i][count] - rest) / rows[i][i]
    return [value / scale for value, scale in zip(answer, scales, strict=True)]
