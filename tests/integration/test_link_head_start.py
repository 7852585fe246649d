"""The launch of a prompt gives way to the links that carry the KV of the one before."""

from pathlib import Path

import pytest

from prefill_worker.engine import LINK_HEAD_START_S
from tests.support.clocked_devices import STEP_S, DeviceRunner, Devices
from tests.support.engine_pair import EnginePair
from tests.support.engine_requests import make_request
from tests.support.tiny_models import make_tiny_llama

LENGTH = 1100


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"))


def ship_first_of_three(folder: Path, length: int = LENGTH) -> tuple[EnginePair, DeviceRunner]:
    """Computes the first prompt, with the second one in flight and the third one in the queue."""
    devices = Devices()
    pair = EnginePair(
        folder, make_rank=devices.make_rank, device="cuda", max_num_batched_tokens=length
    )
    for runner in devices.runners:
        runner.clock = pair.clock
    pair.may_deliver = False
    for index in range(3):
        prompt = tuple(3 + (index + place) % 300 for place in range(length))
        pair.submit(make_request(f"r{index}", prompt))
    pair.prefill.step()
    pair.exchange()
    pair.clock.advance(STEP_S)
    assert pair.prefill.step()
    pair.exchange()
    assert pair.links.in_flight
    return pair, devices.runners[0]


def test_the_next_prompt_is_launched_once_all_frames_are_sent(folder: Path) -> None:
    pair, prefill = ship_first_of_three(folder)
    assert 0 < pair.prefill.pause_s() <= LINK_HEAD_START_S
    pair.prefill.step()
    assert len(prefill.launched) == 2
    pair.may_deliver = True
    pair.exchange()
    assert pair.prefill.pause_s() > 1.0
    pair.prefill.step()
    assert len(prefill.launched) == 3


def test_a_slow_link_puts_the_launch_off_for_a_moment_only(folder: Path) -> None:
    pair, prefill = ship_first_of_three(folder)
    pair.clock.advance(LINK_HEAD_START_S)
    pair.prefill.step()
    assert len(prefill.launched) == 3


def test_a_device_that_is_nearly_idle_is_given_work_first(folder: Path) -> None:
    pair, prefill = ship_first_of_three(folder, length=200)
    pair.prefill.step()
    assert len(prefill.launched) == 3
