"""A kernel that is launched again and again with arguments of the same kinds."""

import triton
from torch import Tensor

Argument = Tensor | int | float
Constant = int | bool


class FixedLaunch:
    """Compiles a kernel once, then launches it without looking its arguments over.

    Triton's own launch examines every argument to find the compiled kernel, which takes it longer
    than all the rest. Here the caller promises that integers and alignments are of the same kind
    each time (Triton compiles for divisibility by 16, and for the number 1). Any thread.
    """

    def __init__(
        self, kernel: triton.JITFunction, constants: dict[str, Constant], num_warps: int
    ) -> None:
        """Keeps them; the first launch compiles.

        Args:
            kernel: its constants are its last parameters.
            constants: in the order of the kernel's parameters.
            num_warps: of each program.
        """
        self._kernel = kernel
        self._constants = constants
        self._values = tuple(constants.values())
        self._num_warps = num_warps
        self._compiled: triton.compiler.CompiledKernel | None = None

    def __call__(self, num_programs: int, stream: int, *arguments: Argument) -> None:
        """Launches so many programs on a stream, given by its handle."""
        if triton.knobs.runtime.interpret:
            options = {**self._constants, "num_warps": self._num_warps}
            self._kernel[(num_programs,)](*arguments, **options)
            return
        if self._compiled is None:
            self._compiled = self._kernel.warmup(
                *arguments, grid=(1,), num_warps=self._num_warps, **self._constants
            )
        addresses = (one.data_ptr() if isinstance(one, Tensor) else one for one in arguments)
        self._compiled[(num_programs, 1, 1)](*addresses, *self._values, stream=stream)
