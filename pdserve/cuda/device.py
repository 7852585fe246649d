"""The device that computes: its stream, its events, its pinned host memory.

On the CPU the same code runs without them, kernels in Triton's interpreter: so is the engine
tested where there is no GPU.
"""

import logging
from typing import Protocol

import torch
import triton
from torch import Tensor

from pdserve.errors import ConfigError
from pdserve.kernels.gluon_version import has_known_gluon
from pdserve.kernels.kernel_loading import load_kernels_one_by_one

logger = logging.getLogger(__name__)

MIN_CAPABILITY = (8, 0)
HOPPER = 9
"""Its major capability; the streamed kernels are for it alone."""
DEPENDENT_LAUNCH_CAPABILITY = (9, 0)
"""From here on a kernel may start while the one before it drains."""


class StepEvent(Protocol):
    """A point in the device's work."""

    def query(self) -> bool:
        """Says whether the device has been there."""
        ...

    def synchronize(self) -> None:
        """Waits until the device is there; callable from any thread."""
        ...


class _Reached:
    """A point that is always passed."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return


class Device:
    """One device and the stream of its engine. Used by the thread that made it."""

    def __init__(self, device: torch.device) -> None:
        """Makes a stream of its own, and the thread's current one.

        Raises:
            ConfigError: there is no such GPU, or it is too old.
        """
        self.torch_device = device
        self.is_cuda = device.type == "cuda"
        self.has_dependent_launch = False
        if not self.is_cuda:
            return
        if not torch.cuda.is_available():
            raise ConfigError(
                "device cuda needs a CUDA GPU and a torch built for it, found none",
                settings=("device",),
            )
        capability = torch.cuda.get_device_capability(device)
        if capability < MIN_CAPABILITY:
            raise ConfigError(
                f"device cuda needs compute capability {MIN_CAPABILITY}, "
                f"{torch.cuda.get_device_name(device)} has {capability}",
                settings=("device",),
            )
        self.has_dependent_launch = capability >= DEPENDENT_LAUNCH_CAPABILITY
        if capability[0] == HOPPER and not has_known_gluon():
            logger.warning(
                "this version of Triton is not one that the streamed kernels are written for: "
                "products and decode attention use slower ones",
                extra={"triton": triton.__version__},
            )
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.torch_device = device
        torch.cuda.set_device(device)
        load_kernels_one_by_one()
        torch.cuda.set_stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]

    @property
    def name(self) -> str:
        """What it calls itself."""
        return torch.cuda.get_device_name(self.torch_device) if self.is_cuda else "cpu"

    @property
    def num_sms(self) -> int:
        """Multiprocessors; the interpreter runs one program at a time."""
        if not self.is_cuda:
            return 1
        return torch.cuda.get_device_properties(self.torch_device).multi_processor_count

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns host memory that the device can copy from and to by itself."""
        return torch.zeros(shape, dtype=dtype, pin_memory=self.is_cuda)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns memory of the device."""
        return torch.zeros(shape, dtype=dtype, device=self.torch_device)

    def record(self) -> StepEvent:
        """Marks the present end of the stream."""
        if not self.is_cuda:
            return _Reached()
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def synchronize(self) -> None:
        """Waits for all work."""
        if self.is_cuda:
            torch.cuda.synchronize(self.torch_device)

    @property
    def uuid(self) -> str:
        """Names the GPU, alike in all processes."""
        return str(torch.cuda.get_device_properties(self.torch_device).uuid)

    def free_bytes(self) -> int:
        """Returns what is free of the device, caches of torch given back first."""
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.torch_device)[0]

    def total_bytes(self) -> int:
        """Returns the device's memory."""
        return torch.cuda.mem_get_info(self.torch_device)[1]
