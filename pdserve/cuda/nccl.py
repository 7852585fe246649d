"""NCCL communicators of two members, without a process group around them.

Called directly, in non-blocking mode: every call returns at once or is polled, so that a peer that
never comes, or dies, costs no more than the caller's own deadline. torch's process groups would add
a watchdog that takes the process down, and a set-up that cannot time out.
"""

import ctypes
import time
from collections.abc import Callable
from functools import cache
from typing import cast

import torch
from torch import Tensor

from pdserve.cuda.faults import DeviceFault

UNIQUE_ID_BYTES = 128
NUM_MEMBERS = 2
_CONFIG_MAGIC = 0xCAFEBEEF
_CONFIG_VERSION = 22700
"""Of the fields below; a newer NCCL fills in what it has beyond them."""
_UNDEFINED = -(1 << 31)
_SUCCESS, _IN_PROGRESS = 0, 7
_UINT8 = 1
_POLL_S = 20e-6
_SPIN_S = 500e-6
"""A launch is through within 0.1 ms: sleeping, which takes as long, would double it."""


class NcclFault(DeviceFault):
    """A communicator failed, or did not come up in time."""


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * UNIQUE_ID_BYTES),)


class _Config(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
        ("traffic_class", ctypes.c_int),
        ("comm_name", ctypes.c_char_p),
        ("collnet_enable", ctypes.c_int),
        ("cta_policy", ctypes.c_int),
        ("shrink_share", ctypes.c_int),
        ("nvls_ctas", ctypes.c_int),
    )


def make_unique_id() -> bytes:
    """Returns what both members of one communicator name it by, 128 bytes.

    This process listens for the other member from now on.

    Raises:
        NcclFault: there is no NCCL, or no network that it can use.
    """
    unique_id = _UniqueId()
    _check(_library().ncclGetUniqueId(ctypes.byref(unique_id)))
    return bytes(memoryview(unique_id).cast("B"))


class NcclPair:
    """One end of a communicator. Used by one thread.

    `is_given_up` is asked between polls: True ends any wait with a fault.
    """

    def __init__(
        self,
        unique_id: bytes,
        member: int,
        device: torch.device,
        *,
        max_ctas: int,
        timeout_s: float,
        is_given_up: Callable[[], bool],
    ) -> None:
        """Meets the other member.

        Args:
            unique_id: made by one of the two.
            member: 0 or 1, this one's number.
            device: of this member; the other one's must be another.
            max_ctas: thread blocks that a transfer may occupy.
            timeout_s: deadline of the meeting, and of each launch.
            is_given_up: whether to stop waiting.

        Raises:
            NcclFault: it did not come up in time.
        """
        assert len(unique_id) == UNIQUE_ID_BYTES
        self._peer = 1 - member
        self._timeout_s = timeout_s
        self._is_given_up = is_given_up
        self._comm = ctypes.c_void_p()
        config = _Config(
            size=ctypes.sizeof(_Config),
            magic=_CONFIG_MAGIC,
            version=_CONFIG_VERSION,
            blocking=0,
            cga_cluster_size=_UNDEFINED,
            min_ctas=1,
            max_ctas=max_ctas,
            split_share=_UNDEFINED,
            traffic_class=_UNDEFINED,
            collnet_enable=_UNDEFINED,
            cta_policy=_UNDEFINED,
            shrink_share=_UNDEFINED,
            nvls_ctas=_UNDEFINED,
        )
        identity = _UniqueId.from_buffer_copy(unique_id)
        with torch.cuda.device(device):
            code = _library().ncclCommInitRankConfig(
                ctypes.byref(self._comm), NUM_MEMBERS, identity, member, ctypes.byref(config)
            )
            try:
                self._finish(code)
            except NcclFault:
                self.abort()
                raise

    def send(self, payload: Tensor, stream: torch.cuda.Stream) -> None:
        """Launches the sending of contiguous bytes.

        Raises:
            NcclFault: it cannot be launched.
        """
        library = _library()
        self._finish(
            library.ncclSend(
                payload.data_ptr(),
                payload.numel() * payload.element_size(),
                _UINT8,
                self._peer,
                self._comm,
                stream.cuda_stream,
            )
        )

    def receive(self, slot: Tensor, stream: torch.cuda.Stream) -> None:
        """Launches the receiving of as many bytes as the slot has.

        Raises:
            NcclFault: it cannot be launched.
        """
        library = _library()
        self._finish(
            library.ncclRecv(
                slot.data_ptr(),
                slot.numel() * slot.element_size(),
                _UINT8,
                self._peer,
                self._comm,
                stream.cuda_stream,
            )
        )

    def abort(self) -> None:
        """Ends what is under way on this device, whatever the peer does, and frees all memory.

        Takes up to a second; the device is usable at once. May be repeated.
        """
        comm, self._comm = self._comm, ctypes.c_void_p()
        if comm:
            _library().ncclCommAbort(comm)

    def _finish(self, code: int) -> None:
        """Waits until the last call is through: only then has its work been launched."""
        state = ctypes.c_int(code)
        started_s = time.monotonic()
        deadline_s = started_s + self._timeout_s
        while state.value == _IN_PROGRESS:
            if self._is_given_up():
                raise NcclFault("NCCL: given up")
            if time.monotonic() > deadline_s:
                raise NcclFault(f"NCCL: the peer did not come within {self._timeout_s} s")
            time.sleep(0 if time.monotonic() - started_s < _SPIN_S else _POLL_S)
            comm = self._comm
            if not comm:
                raise NcclFault("NCCL: aborted")
            _check(_library().ncclCommGetAsyncError(comm, ctypes.byref(state)))
        _check(state.value)


@cache
def _library() -> ctypes.CDLL:
    """Returns the NCCL that torch has loaded, with its argument types declared."""
    if not torch.cuda.is_available():
        raise NcclFault("NCCL needs a CUDA device")
    try:
        library = ctypes.CDLL("libnccl.so.2")
    except OSError as error:
        raise NcclFault(f"this torch has no NCCL: {error}") from error
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.ncclGetUniqueId.argtypes = [ctypes.POINTER(_UniqueId)]
    library.ncclCommInitRankConfig.argtypes = [
        ctypes.POINTER(pointer),
        number,
        _UniqueId,
        number,
        ctypes.POINTER(_Config),
    ]
    library.ncclSend.argtypes = [pointer, size, number, number, pointer, pointer]
    library.ncclRecv.argtypes = [pointer, size, number, number, pointer, pointer]
    library.ncclCommAbort.argtypes = [pointer]
    library.ncclCommGetAsyncError.argtypes = [pointer, ctypes.POINTER(number)]
    library.ncclGetErrorString.argtypes = [number]
    library.ncclGetErrorString.restype = ctypes.c_char_p
    return library


def _check(code: int) -> None:
    if code not in (_SUCCESS, _IN_PROGRESS):
        text = cast(bytes, _library().ncclGetErrorString(code)).decode()
        raise NcclFault(f"NCCL: {text} ({code})")
