"""Links between ranks on GPUs, each in a process that sees its own alone.

Both ends share one where there is but one.
"""

import random
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from pdserve.config.worker import FaultConfig, HandoffConfig
from tests.support.gpu_link_rank import LLAMA_8B, GpuRank, RankSettings
from tests.support.gpus import count_gpus, gpu_of, needs_gpus

NUM_BLOCKS = 512
P, D = 1, 9
MAX_RECOVERY_S = 2.0
"""A survivor serves on within this time."""

NCCL = pytest.param("nccl", marks=needs_gpus(2, "NCCL joins the ends"))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as cleanup:
        yield cleanup


def start(
    stack: ExitStack,
    incarnation: int,
    gpu: int,
    handoff: HandoffConfig,
    faults: FaultConfig | None = None,
) -> GpuRank:
    settings = RankSettings(
        incarnation=incarnation, handoff=handoff, faults=faults or FaultConfig()
    )
    rank = GpuRank(settings, gpu_of(gpu))
    stack.callback(rank.close)
    return rank


def scattered_table(num_tokens: int, seed: int) -> list[int]:
    order = list(range(NUM_BLOCKS))
    random.Random(seed).shuffle(order)
    return order[: -(-num_tokens // LLAMA_8B.block_size)]


def hand_off(prefill: GpuRank, decode: GpuRank, num_tokens: int, seed: int = 0) -> float:
    """Moves a sequence; returns the seconds until it was scattered."""
    source, target = scattered_table(num_tokens, seed), scattered_table(num_tokens, seed + 100)
    endpoint = decode.call("endpoint")
    decode.begin("receive", table=target, num_tokens=num_tokens)
    prefill.begin("push", endpoint=endpoint, peer=D, table=source, num_tokens=num_tokens)
    begun_at_s, _ = prefill.end()
    ended_at_s, are_intact = decode.end()
    assert are_intact
    return float(ended_at_s - begun_at_s)


def same_values(prefill: GpuRank, decode: GpuRank, num_tokens: int, seed: int = 0) -> bool:
    source, target = scattered_table(num_tokens, seed), scattered_table(num_tokens, seed + 100)
    sent = prefill.call("digest", table=source, num_tokens=num_tokens)
    return bool(sent == decode.call("digest", table=target, num_tokens=num_tokens))


@pytest.mark.parametrize("transport", ["push", NCCL, "gloo"])
def test_every_token_lands_exactly(stack: ExitStack, transport: str) -> None:
    handoff = HandoffConfig(transports=(transport,), ring_slots=2)
    prefill, decode = start(stack, P, 0, handoff), start(stack, D, 1, handoff)
    prefill.wait_ready()
    decode.wait_ready()
    for seed, num_tokens in enumerate((2048, 37, 1500)):
        hand_off(prefill, decode, num_tokens, seed)
        assert same_values(prefill, decode, num_tokens, seed)
    assert prefill.call("status") == [(transport, ())]
    assert decode.call("status") == [(transport, ())]


def test_two_processes_on_one_gpu_push(stack: ExitStack) -> None:
    prefill, decode = start(stack, P, 0, HandoffConfig()), start(stack, D, 0, HandoffConfig())
    prefill.wait_ready()
    decode.wait_ready()
    hand_off(prefill, decode, 1000)
    assert same_values(prefill, decode, 1000)
    assert prefill.call("status") == [("push", ())]


@pytest.mark.parametrize("transport", ["push", NCCL])
def test_a_spoilt_frame_is_seen_on_the_device(stack: ExitStack, transport: str) -> None:
    handoff = HandoffConfig(transports=(transport,))
    prefill = start(stack, P, 0, handoff, FaultConfig(corrupt_frame=2))
    decode = start(stack, D, 1, handoff)
    prefill.wait_ready()
    decode.wait_ready()
    endpoint, table = decode.call("endpoint"), scattered_table(2048, 0)
    flags = []
    for _ in range(2):
        decode.begin("receive", table=table, num_tokens=2048)
        prefill.call("push", endpoint=endpoint, peer=D, table=table, num_tokens=2048)
        flags.append(decode.end()[1])
    assert flags == [False, True]


@pytest.mark.parametrize("transport", ["push", NCCL])
def test_C3_C10_decode_survives_a_prefill_rank_killed_in_mid_frame(
    stack: ExitStack, transport: str
) -> None:
    handoff = HandoffConfig(transports=(transport,))
    first, killed, next_one = (start(stack, number, 0, handoff) for number in (P, P + 1, P + 2))
    decode = start(stack, D, 1, handoff)
    for rank in (first, killed, next_one, decode):
        rank.wait_ready()
    endpoint, table = decode.call("endpoint"), scattered_table(4096, 0)
    free_mib = measure_after_one_link(first, decode)
    decode.begin("receive_until_down", table=table)
    killed.begin("push_until_down", endpoint=endpoint, peer=D, table=table)
    time.sleep(2.0)
    killed.kill()
    killed_at_s = time.monotonic()
    heard_at_s = decode.end()
    assert heard_at_s - killed_at_s < MAX_RECOVERY_S
    wait_for_memory(decode, free_mib, MAX_RECOVERY_S)
    assert decode.call("compute") == 256**3
    hand_off(next_one, decode, 2048)
    assert same_values(next_one, decode, 2048)


@pytest.mark.parametrize("transport", ["push", NCCL])
def test_C3_C10_prefill_survives_a_decode_rank_killed_in_mid_frame(
    stack: ExitStack, transport: str
) -> None:
    handoff = HandoffConfig(transports=(transport,))
    prefill = start(stack, P, 0, handoff)
    first, killed, next_one = (start(stack, D, 1, handoff) for _ in range(3))
    for rank in (prefill, first, killed, next_one):
        rank.wait_ready()
    table = scattered_table(4096, 0)
    free_mib = measure_after_one_link(prefill, first, is_prefill=True)
    endpoint = killed.call("endpoint")
    killed.begin("receive_until_down", table=table)
    prefill.begin("push_until_down", endpoint=endpoint, peer=D, table=table)
    time.sleep(2.0)
    killed.kill()
    killed_at_s = time.monotonic()
    heard_at_s = prefill.end()
    assert heard_at_s - killed_at_s < MAX_RECOVERY_S
    wait_for_memory(prefill, free_mib, MAX_RECOVERY_S)
    assert prefill.call("compute") == 256**3
    hand_off(prefill, next_one, 2048)
    assert same_values(prefill, next_one, 2048)


def measure_after_one_link(prefill: GpuRank, decode: GpuRank, *, is_prefill: bool = False) -> int:
    """Makes a link and kills its other end; returns what is free on the survivor's GPU then.

    What a process takes for its first link of a kind (kernels of NCCL) it keeps.
    """
    survivor, other = (prefill, decode) if is_prefill else (decode, prefill)
    hand_off(prefill, decode, 600)
    other.kill()
    time.sleep(2.0)
    # The event of the death belongs to no later call.
    survivor.call("drain")
    return int(survivor.call("memory"))


def wait_for_memory(rank: GpuRank, free_mib: int, timeout_s: float) -> None:
    """Waits until as much is free as before; 4 MiB are left to the driver.

    On a GPU that both ends share this would say nothing: the dead one's own memory is free there.
    """
    if count_gpus() < 2:
        return
    deadline_s = time.monotonic() + timeout_s
    while rank.call("memory") < free_mib - 4:
        assert time.monotonic() < deadline_s, (rank.call("memory"), free_mib)
        time.sleep(0.05)
