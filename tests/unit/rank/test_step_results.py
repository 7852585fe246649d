"""What the last stage samples reaches rank 0 in the order of the steps, or not at all."""

import queue
from dataclasses import dataclass

import pytest

from pdserve.engine.batch import StepResult
from pdserve.errors import WorkerLost
from pdserve.rank.inbox import ChannelLost, Inbox
from pdserve.rank.step_results import (
    ResultReceiver,
    ResultSender,
    result_from_wire,
    result_to_wire,
)
from pdserve.request import RequestId, SampledToken, TokenLogprobs
from pdserve.rpc.channel import ChannelClosed
from pdserve.rpc.v1 import rank_pb2

SCORED = TokenLogprobs(token_id=5, logprob=-0.5, top=((7, -0.25), (5, -0.5)))


@dataclass
class EndedStep:
    outcome: StepResult | Exception

    def is_over(self) -> bool:
        return True

    def wait(self) -> None:
        return

    def result(self) -> StepResult:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


def result_of(token_id: int) -> StepResult:
    return StepResult(sampled={RequestId("r"): SampledToken(token_id=token_id)})


@pytest.mark.parametrize(
    "result",
    [
        StepResult(sampled={}),
        StepResult(
            sampled={
                RequestId("a"): SampledToken(token_id=0),
                RequestId("b"): SampledToken(token_id=5, logprobs=SCORED),
            },
            prompt_logprobs={RequestId("b"): (SCORED, TokenLogprobs(token_id=1, logprob=-2.0))},
        ),
    ],
)
def test_a_result_comes_back_from_the_wire_as_it_was(result: StepResult):
    wire = rank_pb2.StepDone.FromString(result_to_wire(result).SerializeToString())
    assert result_from_wire(wire) == result


def test_each_step_gets_its_own_result():
    receiver = ResultReceiver()
    steps = [receiver.expect() for _ in range(2)]
    receiver.post(result_to_wire(result_of(1)))
    assert [step.is_over() for step in steps] == [True, False]
    receiver.post(result_to_wire(result_of(2)))
    assert [step.result() for step in steps] == [result_of(1), result_of(2)]


def test_B9_the_death_of_a_rank_ends_every_step_that_is_waited_for():
    receiver = ResultReceiver()
    before = receiver.expect()
    receiver.close()
    for step in (before, receiver.expect()):
        assert step.is_over()
        with pytest.raises(ChannelClosed, match="a rank died"):
            step.result()


def test_what_was_told_before_a_rank_died_counts():
    receiver = ResultReceiver()
    step = receiver.expect()
    receiver.post(result_to_wire(result_of(1)))
    receiver.close()
    assert step.result() == result_of(1)


def test_steps_are_told_in_the_order_of_their_launch():
    told: queue.SimpleQueue[rank_pb2.FromFollower] = queue.SimpleQueue()
    sender = ResultSender(told.put, Inbox())
    for token_id in range(3):
        sender.put(EndedStep(result_of(token_id)))
    found = [result_from_wire(told.get(timeout=10).step_done) for _ in range(3)]
    assert found == [result_of(token_id) for token_id in range(3)]


@pytest.mark.parametrize("error", [WorkerLost("a stage is missing"), ChannelClosed("gone")])
def test_a_step_that_failed_ends_the_rank(error: Exception):
    inbox = Inbox()
    sender = ResultSender(lambda message: None, inbox)
    sender.put(EndedStep(error))
    (event,) = inbox.drain(10)
    assert isinstance(event, ChannelLost)
