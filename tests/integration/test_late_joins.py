"""A hand-off that lands in the middle of a decode step is in the next one."""

from pathlib import Path

import pytest

from pdserve.config.worker import HandoffConfig
from pdserve.engine.batch import StepPlan
from pdserve.request import SamplingParams
from tests.support.clocked_devices import STEP_S, Devices
from tests.support.engine_pair import EnginePair
from tests.support.engine_requests import make_request
from tests.support.pair_router import PairRouter
from tests.support.tiny_models import make_tiny_llama

PROMPT = tuple(range(3, 40))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"))


def land_in_mid_step(folder: Path, *, joins_late: bool) -> tuple[list[StepPlan], float]:
    """Lets B land half a step after a decode step of A began.

    Returns:
        The steps of decode from that one on, and how long the loop might have slept in it.
    """
    devices = Devices()
    handoff = HandoffConfig(frame_tokens=64, joins_late=joins_late)
    pair = EnginePair(folder, handoff=handoff, make_rank=devices.make_rank)
    for runner in devices.runners:
        runner.clock = pair.clock
    decode = devices.runners[1]
    sampling = SamplingParams(temperature=0.0, max_tokens=40)
    router = PairRouter(pair)
    running = make_request("a", PROMPT, sampling=sampling)
    router.adopt(running)
    pair.submit(running, is_local=True)
    for _ in range(8):
        pair.decode.step()
        pair.clock.advance(STEP_S)
    pair.may_deliver = False
    pair.submit(make_request("b", PROMPT[::-1], sampling=sampling))
    pair.prefill.step()
    pair.exchange()
    pair.clock.advance(STEP_S)
    pair.prefill.step()
    pair.exchange()
    while pair.decode.step():
        pass
    num_over = sum(end_s <= pair.clock.now() for end_s in decode.ends_s)
    pause_s = pair.decode.pause_s()
    pair.clock.advance(STEP_S / 2)
    pair.decode.step()
    pair.may_deliver = True
    pair.exchange()
    for _ in range(3):
        pair.decode.step()
        pair.clock.advance(STEP_S / 2)
    return decode.launched[num_over:], pause_s


def names_in(plan: StepPlan) -> set[str]:
    return {part.request.request_id for part in plan.slices}


def test_what_lands_in_a_step_is_in_the_next_one_if_launches_are_late(folder: Path) -> None:
    steps, pause_s = land_in_mid_step(folder, joins_late=True)
    assert [names_in(step) for step in steps[:2]] == [{"a"}, {"a", "b"}]
    assert 0 < pause_s < STEP_S


def test_it_waits_a_step_longer_if_launches_are_early(folder: Path) -> None:
    steps, pause_s = land_in_mid_step(folder, joins_late=False)
    assert [names_in(step) for step in steps[:2]] == [{"a"}, {"a"}]
    assert pause_s > 1.0
