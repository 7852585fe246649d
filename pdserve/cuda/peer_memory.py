"""Device memory that processes of one host share, by CUDA's inter-process handles.

It comes from cudaMalloc itself: torch's caching allocator cuts its blocks from larger ones, and a
handle always opens the whole of one. A process that maps a buffer keeps its pages: they are freed
when both sides have closed it, or died.
"""

import ctypes

import torch
from torch import Tensor

from pdserve.cuda.runtime import HANDLE_BYTES, Handle, check, load_runtime

ALIGNMENT_BYTES = 2 * 1024 * 1024
"""Smaller buffers would share a page, and so a handle, with others."""
_LAZY_PEER_ACCESS = 1


class PeerBuffer:
    """Zeroed device memory of this process that others may map. Freed by `close` only."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Allocates it.

        Raises:
            CudaFault: the device has not that much left.
        """
        assert num_bytes >= 1
        self._device = device
        self._address = ctypes.c_void_p()
        num_allocated = -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        runtime = load_runtime()
        with torch.cuda.device(device):
            check("cudaMalloc", runtime.cudaMalloc(ctypes.byref(self._address), num_allocated))
            check("cudaMemset", runtime.cudaMemset(self._address, 0, num_allocated))
            # The memset may still run, and a peer's kernel does not queue behind it.
            torch.cuda.synchronize(device)
            handle = Handle()
            check("cudaIpcGetMemHandle", runtime.cudaIpcGetMemHandle(handle, self._address))
        self.handle = bytes(memoryview(handle).cast("B"))
        """What another process opens it with, 64 bytes."""
        self.tensor = view_memory(self._address, num_bytes, device)
        """uint8 [num_bytes]; no view of it may be used after `close`."""

    def close(self) -> None:
        """Frees it, once all work on the device is done; may be repeated."""
        if not self._address:
            return
        address, self._address = self._address, ctypes.c_void_p()
        self.tensor = self.tensor[:0].clone()
        with torch.cuda.device(self._device):
            check("cudaFree", load_runtime().cudaFree(address))


class OpenedBuffer:
    """Another process's `PeerBuffer`, mapped for the kernels of a device of this one."""

    def __init__(self, handle: bytes, num_bytes: int, device: torch.device) -> None:
        """Maps it.

        Args:
            handle: of the buffer; its own process cannot open it.
            num_bytes: at most what its owner asked for; the caller must trust the figure.
            device: whose kernels and copies will use it.

        Raises:
            CudaFault: the owner is gone, or the device cannot reach it.
        """
        assert len(handle) == HANDLE_BYTES
        self._device = device
        self._address = ctypes.c_void_p()
        # The mapping belongs to the device that is current, whichever one holds the memory.
        with torch.cuda.device(device):
            code = load_runtime().cudaIpcOpenMemHandle(
                ctypes.byref(self._address), Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS
            )
            check("cudaIpcOpenMemHandle", code)
        self.tensor = view_memory(self._address, num_bytes, device)
        """uint8 [num_bytes], of `device` as torch sees it; not to be used after `close`."""

    def close(self) -> None:
        """Unmaps it, once all work on the device is done; may be repeated."""
        if not self._address:
            return
        address, self._address = self._address, ctypes.c_void_p()
        self.tensor = self.tensor[:0].clone()
        with torch.cuda.device(self._device):
            check("cudaIpcCloseMemHandle", load_runtime().cudaIpcCloseMemHandle(address))


def view_memory(address: ctypes.c_void_p, num_bytes: int, device: torch.device) -> Tensor:
    """Returns raw memory as uint8 [num_bytes] of a device, without owning it.

    By its address alone, torch would look the device up, and find the owner's.
    """
    assert address.value is not None
    storage = torch._C._construct_storage_from_data_pointer(address.value, device, num_bytes)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
