"""The seam between a model and wherever its weights come from."""

from typing import Protocol

from torch import Tensor


class WeightSource(Protocol):
    """Gives out named tensors under the names of Hugging Face checkpoints."""

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Returns a tensor; it may be a view of a mapped file and must not be written.

        Raises:
            ConfigError: there is no such tensor, or its shape differs.
        """
        ...
