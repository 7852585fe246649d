"""The calls of the CUDA runtime that torch does not offer, or not as cheaply."""

import ctypes
from functools import cache
from typing import cast

import torch
from torch import Tensor

from pdserve.cuda.faults import DeviceFault

HANDLE_BYTES = 64
_HOST_TO_DEVICE = 1


class CudaFault(DeviceFault):
    """A call of the CUDA runtime failed."""


class Handle(ctypes.Structure):
    """Names memory to another process."""

    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


def upload(target: Tensor, source: Tensor, num_bytes: int, stream: int) -> None:
    """Launches the copy of pinned memory to the device, on a stream by its handle.

    It costs the host less than a copy of torch's.

    Raises:
        CudaFault: it could not be launched.
    """
    if target.device.type == "cpu":
        target.view(torch.uint8)[:num_bytes] = source.view(torch.uint8)[:num_bytes]
        return
    code = _load_short_calls().cudaMemcpyAsync(
        target.data_ptr(), source.data_ptr(), num_bytes, _HOST_TO_DEVICE, stream
    )
    if code:
        check("cudaMemcpyAsync", code)


@cache
def load_runtime() -> ctypes.CDLL:
    """Returns the CUDA runtime that torch has loaded, with its argument types declared."""
    version = torch.version.cuda
    if version is None:
        raise CudaFault("this torch was built without CUDA")
    torch.cuda.init()  # type: ignore[no-untyped-call]
    # Of its soname: the loader hands out the library that is loaded already.
    runtime = ctypes.CDLL(f"libcudart.so.{version.split('.')[0]}")
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    runtime.cudaMalloc.argtypes = [ctypes.POINTER(pointer), size]
    runtime.cudaMemset.argtypes = [pointer, ctypes.c_int, size]
    runtime.cudaFree.argtypes = [pointer]
    runtime.cudaIpcGetMemHandle.argtypes = [ctypes.POINTER(Handle), pointer]
    runtime.cudaIpcOpenMemHandle.argtypes = [ctypes.POINTER(pointer), Handle, ctypes.c_uint]
    runtime.cudaIpcCloseMemHandle.argtypes = [pointer]
    runtime.cudaGetErrorString.argtypes = [ctypes.c_int]
    runtime.cudaGetErrorString.restype = ctypes.c_char_p
    return runtime


@cache
def _load_short_calls() -> ctypes.PyDLL:
    """Returns the runtime for calls that only queue work, and keep the interpreter's lock.

    Who gives the lock away for some microseconds may wait a hundred to have it back.
    """
    load_runtime()
    assert torch.version.cuda is not None
    runtime = ctypes.PyDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")
    pointer = ctypes.c_void_p
    runtime.cudaMemcpyAsync.argtypes = [pointer, pointer, ctypes.c_size_t, ctypes.c_int, pointer]
    return runtime


def check(call: str, code: int) -> None:
    """Raises what a call of the runtime returned.

    Raises:
        CudaFault: it is no success.
    """
    if code == 0:
        return
    runtime = load_runtime()
    runtime.cudaGetLastError()  # else the next call of torch's would raise it again
    text = cast(bytes, runtime.cudaGetErrorString(code)).decode()
    raise CudaFault(f"{call} failed: {text} ({code})")
