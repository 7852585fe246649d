"""How rank 0 learns what another rank sampled: the last stage of a pipeline on GPUs.

    last stage:  launched step -> its own thread waits for the device, reads, tells
    rank 0:      reader of the channel -> the step that expects it, in the order of the launches

The next step's tokens go from device to device meanwhile: nobody waits for this but the streams.
"""

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable

from pdserve.engine.batch import PendingStep, StepResult
from pdserve.rank.inbox import ChannelLost, Inbox
from pdserve.request import RequestId, SampledToken, TokenLogprobs
from pdserve.rpc.channel import ChannelClosed
from pdserve.rpc.codec import logprobs_to_wire
from pdserve.rpc.v1 import rank_pb2, types_pb2

logger = logging.getLogger(__name__)


def result_to_wire(result: StepResult) -> rank_pb2.StepDone:
    """Encodes a result."""
    done = rank_pb2.StepDone()
    for request_id, token in result.sampled.items():
        sampled = done.sampled.add(request_id=request_id, token_id=token.token_id)
        if token.logprobs is not None:
            sampled.logprobs.CopyFrom(logprobs_to_wire(token.logprobs))
    for request_id, scores in result.prompt_logprobs.items():
        done.prompts.add(request_id=request_id, logprobs=map(logprobs_to_wire, scores))
    return done


def result_from_wire(wire: rank_pb2.StepDone) -> StepResult:
    """Decodes a result."""
    return StepResult(
        sampled={
            RequestId(one.request_id): SampledToken(
                token_id=one.token_id,
                logprobs=_logprobs_from_wire(one.logprobs) if one.HasField("logprobs") else None,
            )
            for one in wire.sampled
        },
        prompt_logprobs={
            RequestId(one.request_id): tuple(map(_logprobs_from_wire, one.logprobs))
            for one in wire.prompts
        },
    )


def _logprobs_from_wire(wire: types_pb2.TokenLogprob) -> TokenLogprobs:
    return TokenLogprobs(
        token_id=wire.token_id,
        logprob=wire.logprob,
        top=tuple((one.token_id, one.logprob) for one in wire.top),
    )


class ResultSender:
    """The `StepResults` of the rank that samples."""

    def __init__(self, tell: Callable[[rank_pb2.FromFollower], None], inbox: Inbox) -> None:
        """Starts the thread that waits for steps.

        Args:
            tell: sends to rank 0, from any thread.
            inbox: is told to end the rank when a step fails, or rank 0 is gone.
        """
        self._tell = tell
        self._inbox = inbox
        self._steps: queue.SimpleQueue[PendingStep] = queue.SimpleQueue()
        threading.Thread(target=self._send, name="result-sender", daemon=True).start()

    def put(self, step: PendingStep) -> None:
        """Queues a step that was launched."""
        self._steps.put(step)

    def expect(self) -> "ExpectedStep":
        """Not here."""
        raise AssertionError("results are expected on rank 0")

    def _send(self) -> None:
        try:
            while True:
                done = result_to_wire(self._steps.get().result())
                self._tell(rank_pb2.FromFollower(step_done=done))
        except ChannelClosed:
            self._inbox.post(ChannelLost())
        except Exception:
            # The edge of a thread: rank 0 waits in vain, so the replica must end.
            logger.exception("a step failed")
            self._inbox.post(ChannelLost())


class ExpectedStep:
    """What the last stage tells of one step. Any thread may wait."""

    def __init__(self) -> None:
        """Nothing was told yet."""
        self._is_over = threading.Event()
        self._done: rank_pb2.StepDone | None = None

    def tell(self, done: rank_pb2.StepDone | None) -> None:
        """Ends it; None: nothing will be told, a rank died."""
        self._done = done
        self._is_over.set()

    def is_over(self) -> bool:
        """Says whether there is nothing to wait for."""
        return self._is_over.is_set()

    def wait(self) -> None:
        """Waits. The death of a rank ends that, and a frozen one is killed by its face."""
        self._is_over.wait()

    def result(self) -> StepResult:
        """Waits, and returns what was told.

        Raises:
            ChannelClosed: a rank died before.
        """
        self.wait()
        if self._done is None:
            raise ChannelClosed("a rank died before its step ended")
        return result_from_wire(self._done)


class ResultReceiver:
    """The `StepResults` of rank 0: the engine thread expects, a channel's reader tells."""

    def __init__(self) -> None:
        """Nothing is expected yet."""
        self._lock = threading.Lock()
        self._expected: deque[ExpectedStep] = deque()
        self._is_closed = False

    def expect(self) -> ExpectedStep:
        """Returns what the step that is launched now will have; before its plan can be answered."""
        step = ExpectedStep()
        with self._lock:
            if self._is_closed:
                step.tell(None)
            else:
                self._expected.append(step)
        return step

    def post(self, done: rank_pb2.StepDone) -> None:
        """Notes the result of the oldest step."""
        with self._lock:
            self._expected.popleft().tell(done)

    def close(self) -> None:
        """Notes that no more will come: a rank died."""
        with self._lock:
            self._is_closed = True
            while self._expected:
                self._expected.popleft().tell(None)

    def put(self, step: PendingStep) -> None:
        """Not here."""
        raise AssertionError("rank 0 samples nothing of a pipeline on GPUs")
