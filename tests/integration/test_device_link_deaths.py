"""A prefill rank that pushes from a process of its own is killed, or frozen, in mid-frame."""

import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kv_transfer.events import FrameLanded, LinkDown, LinkEvent
from kv_transfer.receiver import LinkListener
from pdserve.cache.kv_tensors import KvTensors
from pdserve.request import Incarnation
from tests.support.device_link_peer import CONFIG, GEOMETRY, NUM_BLOCKS, make_kv
from tests.support.host_device import HostDevice, Network
from tests.support.kv import whole_blocks

ROOT = Path(__file__).parents[2]
START_S = 60.0
"""A peer is a process that imports torch."""


class Decode:
    """The surviving end, driven by the test."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[LinkEvent] = queue.SimpleQueue()
        self.kv = KvTensors(GEOMETRY, NUM_BLOCKS)
        self.device = HostDevice(self.kv, Network(), uuid="gpu 1")
        self.region = whole_blocks(self.kv, range(NUM_BLOCKS))
        self.listener = LinkListener(
            host="127.0.0.1",
            incarnation=Incarnation(9),
            config=CONFIG,
            slot_bytes=self.kv.frame_bytes(self.region),
            post=self.events.put,
            device=self.device,
        )
        self.children: list[subprocess.Popen[str]] = []

    def start_peer(self, incarnation: int) -> subprocess.Popen[str]:
        endpoint = self.listener.endpoint()
        arguments = (endpoint.port, endpoint.token.hex(), 9, incarnation)
        child = subprocess.Popen(
            [sys.executable, "-m", "tests.support.device_link_peer", *map(str, arguments)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.children.append(child)
        return child

    def land(self, count: int) -> None:
        for _ in range(count):
            landed = self.events.get(timeout=START_S)
            assert isinstance(landed, FrameLanded), landed
            assert landed.is_intact
            mark = self.device.scatter(self.region, self.listener.payload(landed))
            self.listener.release_slot(landed, mark)

    def land_until_down(self) -> LinkDown:
        while True:
            event = self.events.get(timeout=START_S)
            if isinstance(event, LinkDown):
                return event
            assert isinstance(event, FrameLanded)
            self.listener.release_slot(event)

    def is_freed(self) -> bool:
        """A frame that the link had begun to land may come after its end; the engine lets it go."""
        while not self.events.empty():
            event = self.events.get()
            if isinstance(event, FrameLanded):
                self.listener.release_slot(event)
        return self.device.switches.num_open == 0

    def close(self) -> None:
        self.listener.close()
        for child in self.children:
            child.kill()
            child.communicate()


@pytest.fixture
def decode() -> Iterator[Decode]:
    made = Decode()
    yield made
    made.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def test_C3_a_killed_pusher_is_noticed_its_ring_is_freed_and_the_next_one_works(
    decode: Decode,
) -> None:
    victim = decode.start_peer(1)
    decode.land(50)
    victim.send_signal(signal.SIGKILL)
    down = decode.land_until_down()
    assert down.link.peer == 1
    assert "took more than" not in down.detail, "its death was not seen, but that it is slow"
    wait_until(lambda: decode.is_freed() and not decode.listener.links())
    decode.start_peer(2)
    decode.land(20)
    expected = make_kv()
    for layer in range(GEOMETRY.num_layers):
        for one, other in zip(decode.kv.layer(layer), expected.layer(layer), strict=True):
            assert torch.equal(one, other)


def test_a_frozen_pusher_s_ring_stays_out_of_use_until_it_has_let_go(decode: Decode) -> None:
    child = decode.start_peer(1)
    decode.land(20)
    child.send_signal(signal.SIGSTOP)
    (link,) = decode.listener._links.values()
    time.sleep(0.1)
    link.end("the lease is over")
    decode.land_until_down()
    time.sleep(0.3)
    assert decode.device.switches.num_open == 1, "it may wake up and write"
    child.send_signal(signal.SIGCONT)
    assert child.stdout is not None
    assert child.stdout.readline() == "down\n"
    wait_until(decode.is_freed)


def test_a_frozen_pusher_s_death_frees_the_ring(decode: Decode) -> None:
    child = decode.start_peer(1)
    decode.land(20)
    child.send_signal(signal.SIGSTOP)
    (link,) = decode.listener._links.values()
    link.end("the lease is over")
    decode.land_until_down()
    child.send_signal(signal.SIGKILL)
    wait_until(decode.is_freed)
