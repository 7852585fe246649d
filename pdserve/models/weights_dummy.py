"""Random weights made from the configuration alone, the same on every process with one seed."""

import hashlib

import torch
from torch import Tensor

NORM_SUFFIX = "norm.weight"


class DummyWeights:
    """Draws each tensor from a generator seeded by (seed, name)."""

    def __init__(self, seed: int) -> None:
        """Keeps the seed."""
        self._seed = seed

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Returns ones for norms, small values for biases, unit-gain values for the rest."""
        if name.endswith(NORM_SUFFIX):
            return torch.ones(shape)
        digest = hashlib.sha256(f"{self._seed}\x00{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        values = torch.randn(shape, generator=generator)
        return values * (0.1 if len(shape) == 1 else shape[-1] ** -0.5)
