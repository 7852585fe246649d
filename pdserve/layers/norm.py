"""Root-mean-square norm (Zhang and Sennrich, 2019)."""

from torch import Tensor
from torch.nn import functional


class RmsNorm:
    """Scales each row to unit mean square, then by a learned gain."""

    def __init__(self, weight_E: Tensor, epsilon: float) -> None:
        """Keeps the gain."""
        self._weight_E = weight_E
        self._epsilon = epsilon

    def __call__(self, x_ME: Tensor) -> Tensor:
        """Returns [M, E]; each row by itself."""
        return functional.rms_norm(x_ME, self._weight_E.shape, self._weight_E, self._epsilon)
