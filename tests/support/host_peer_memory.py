"""Peer memory in host memory: the two buffers of `pdserve.cuda.peer_memory` without a GPU.

Handles are names of files in shared memory, so they may be opened by any process of the host, or
by the one that made them.
"""

import uuid
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from pdserve.cuda.runtime import HANDLE_BYTES, CudaFault

FOLDER = Path("/dev/shm")


class HostPeerBuffer:
    """Zeroed host memory that others may map."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        assert device.type == "cpu"
        name = f"pdserve-{uuid.uuid4().hex}"
        self._path = FOLDER / name
        with self._path.open("wb") as file:
            file.truncate(num_bytes)
        self.handle = name.encode().ljust(HANDLE_BYTES, b"\0")
        self.tensor = _map(self._path, num_bytes)

    def close(self) -> None:
        self.tensor = self.tensor[:0].clone()
        with suppress(FileNotFoundError):
            self._path.unlink()


class HostOpenedBuffer:
    """Another one's `HostPeerBuffer`."""

    def __init__(self, handle: bytes, num_bytes: int, device: torch.device) -> None:
        assert device.type == "cpu"
        path = FOLDER / handle.rstrip(b"\0").decode()
        if not path.exists() or path.stat().st_size < num_bytes:
            raise CudaFault("no such buffer")
        self.tensor = _map(path, num_bytes)

    def close(self) -> None:
        self.tensor = self.tensor[:0].clone()


def _map(path: Path, num_bytes: int) -> Tensor:
    return torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)
