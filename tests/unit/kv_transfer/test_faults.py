import pytest
import torch

from kv_transfer.faults import FrameFaults
from kv_transfer.links import checksum
from pdserve.config.worker import FaultConfig


def test_the_chosen_frame_alone_is_spoiled_and_its_checksum_shows_it() -> None:
    faults = FrameFaults(FaultConfig(corrupt_frame=2))
    for is_spoiled in (False, True, False):
        payload = torch.arange(64, dtype=torch.uint8)
        number = faults.count()
        faults.spoil_before_checksum(number, payload)
        before = checksum(payload)
        faults.spoil_after_checksum(number, payload)
        assert (checksum(payload) != before) is is_spoiled


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_silent_fault_turns_the_sign_of_every_value(dtype: torch.dtype) -> None:
    faults = FrameFaults(FaultConfig(corrupt_frame_silently=1))
    values = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=dtype)
    payload = values.view(torch.uint8)
    faults.spoil_before_checksum(faults.count(), payload)
    before = checksum(payload)
    faults.spoil_after_checksum(1, payload)
    assert checksum(payload) == before
    assert torch.equal(values.sign(), torch.tensor([-1.0, 1.0, -1.0, -1.0], dtype=dtype))
