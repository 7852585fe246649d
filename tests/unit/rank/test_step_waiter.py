import threading

from pdserve.engine.batch import StepResult
from pdserve.rank.inbox import Inbox
from pdserve.rank.step_waiter import StepOver, StepWaiter

TIMEOUT_S = 10.0


class GatedStep:
    """Ends when its gate opens."""

    def __init__(self, error: Exception | None = None) -> None:
        self.gate = threading.Event()
        self.num_waits = 0
        self._error = error

    def is_over(self) -> bool:
        return self.gate.is_set()

    def wait(self) -> None:
        self.num_waits += 1
        assert self.gate.wait(TIMEOUT_S)
        if self._error is not None:
            raise self._error

    def result(self) -> StepResult:
        raise AssertionError("the engine thread takes results")


def test_the_end_of_a_step_comes_into_the_inbox() -> None:
    inbox = Inbox()
    waiter = StepWaiter(inbox.post)
    step = GatedStep()
    waiter.watch(step)
    assert inbox.drain(0.0) == []
    step.gate.set()
    (event,) = inbox.drain(TIMEOUT_S)
    assert isinstance(event, StepOver)
    waiter.close()


def test_a_step_named_again_is_waited_for_once() -> None:
    inbox = Inbox()
    waiter = StepWaiter(inbox.post)
    first, second = GatedStep(), GatedStep()
    for step in (first, first, second, second):
        waiter.watch(step)
    first.gate.set()
    second.gate.set()
    waiter.close()
    assert len(inbox.drain(0.0)) == 2
    assert (first.num_waits, second.num_waits) == (1, 1)


def test_a_step_that_fails_is_over_and_does_not_end_the_thread() -> None:
    inbox = Inbox()
    waiter = StepWaiter(inbox.post)
    for step in (GatedStep(RuntimeError("the device is gone")), GatedStep()):
        step.gate.set()
        waiter.watch(step)
        assert len(inbox.drain(TIMEOUT_S)) == 1
    waiter.close()


def test_closing_an_idle_waiter_ends_its_thread() -> None:
    before = set(threading.enumerate())
    waiter = StepWaiter(Inbox().post)
    waiter.close()
    # Not the number: a thread of another test may end meanwhile.
    assert set(threading.enumerate()) <= before
