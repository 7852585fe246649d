"""A kernel that is launched again and again with arguments of the same kinds."""

import threading

import triton
from torch import Tensor

Argument = Tensor | int | float
Constant = int | bool


_LOADING = threading.Lock()
"""Of two threads that load one kernel, Triton 3.6 lets the second go on with nothing loaded."""


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
        compiled = self._compiled or self._compile(arguments)
        addresses = (one.data_ptr() if isinstance(one, Tensor) else one for one in arguments)
        compiled[(num_programs, 1, 1)](*addresses, *self._values, stream=stream)

    def _compile(self, arguments: tuple[Argument, ...]) -> triton.compiler.CompiledKernel:
        with _LOADING:
            compiled = self._kernel.warmup(
                *arguments, grid=(1,), num_warps=self._num_warps, **self._constants
            )
            compiled[(1, 1, 1)]  # loads it
            self._compiled = compiled
        return compiled
