"""Buffers that processes share. With a GPU, see tests/gpu/test_links.py."""

import ctypes

import pytest
import torch

from pdserve.cuda.peer_memory import OpenedBuffer, PeerBuffer, view_memory
from pdserve.cuda.runtime import CudaFault
from tests.support.host_peer_memory import HostOpenedBuffer, HostPeerBuffer

CPU = torch.device("cpu")


def test_raw_memory_is_seen_as_a_tensor_of_the_named_device() -> None:
    memory = torch.arange(64, dtype=torch.uint8)
    view = view_memory(ctypes.c_void_p(memory.data_ptr()), 48, CPU)
    view[3] = 200
    assert memory[3] == 200
    assert view.shape == (48,)
    assert view.device == CPU


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_without_cuda_a_buffer_is_refused_in_plain_words() -> None:
    with pytest.raises((CudaFault, RuntimeError, AssertionError)):
        PeerBuffer(16, torch.device("cuda", 0))
    with pytest.raises((CudaFault, RuntimeError, AssertionError)):
        OpenedBuffer(bytes(64), 16, torch.device("cuda", 0))


def test_a_host_buffer_starts_with_zeros_and_is_seen_by_who_opens_it() -> None:
    buffer = HostPeerBuffer(1000, CPU)
    opened = HostOpenedBuffer(buffer.handle, 1000, CPU)
    assert len(buffer.handle) == 64
    assert not opened.tensor.any()
    buffer.tensor[999] = 7
    assert opened.tensor[999] == 7
    buffer.close()
    assert opened.tensor[999] == 7
    opened.close()


def test_a_closed_host_buffer_cannot_be_opened() -> None:
    buffer = HostPeerBuffer(10, CPU)
    buffer.close()
    with pytest.raises(CudaFault):
        HostOpenedBuffer(buffer.handle, 10, CPU)
