"""Loads compiled kernels one at a time, whichever threads of a process launch them first.

Triton 3.6 keeps what launches a kernel in an extension module, and all of these have one name. For
a file that was loaded before, Python hands out the module that has the name now, and changes it:
between that and the reading of its function another thread's load may change it again, and a
kernel is launched with the arguments of another one.
"""

import threading
from typing import Any

from triton.backends.nvidia.driver import CudaDriver, CudaLauncher
from triton.runtime import driver


class OneByOneDriver(CudaDriver):  # type: ignore[misc]  # Triton has no types
    """Triton's driver, which makes one launcher at a time."""

    def __init__(self) -> None:
        """Takes the place of the driver's maker of launchers."""
        super().__init__()
        self._loading = threading.Lock()
        self.launcher_cls = self._load

    def _load(self, source: Any, metadata: Any) -> CudaLauncher:
        with self._loading:
            return CudaLauncher(source, metadata)


def load_kernels_one_by_one() -> None:
    """Makes it so in this process; to be called before kernels are launched by several threads."""
    if not isinstance(driver.active, OneByOneDriver):
        driver.set_active(OneByOneDriver())
