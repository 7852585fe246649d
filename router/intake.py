"""The one door for requests, whatever protocol they came by."""

import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass

from pdserve.errors import InternalError, NoWorker, PdserveError
from pdserve.rpc.v1 import inference_pb2
from pdserve.timeline import Clock
from pdserve.trace import TraceId
from router.active import ActiveRequest
from router.dispatch import Dispatcher
from router.metrics import RouterMetrics
from router.output import Delta
from router.prompt import PLAIN_PROMPT, PromptOptions, RequestMaker, mint_handoff_id
from router.slo import SloClasses
from router.tenants import Tenant, narrow_salt

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """What a client says of its call beside the request: for logs, and to ask for it later."""

    trace_id: TraceId | None = None
    http_request_id: str | None = None
    """X-Request-Id."""


UNKNOWN_ORIGIN = Origin()

Event = inference_pb2.PromptChunk | inference_pb2.TokenChunk | inference_pb2.Completion


class Intake:
    """Checks, admits and starts requests; every refusal is counted once."""

    def __init__(
        self,
        maker: RequestMaker,
        dispatcher: Dispatcher,
        metrics: RouterMetrics,
        clock: Clock,
        default_timeout_s: float | None,
        slo_classes: SloClasses,
    ) -> None:
        """Takes the parts of one front."""
        self._slo_classes = slo_classes
        self.maker = maker
        self.dispatcher = dispatcher
        self._metrics = metrics
        self._clock = clock
        self._default_timeout_s = default_timeout_s
        self.is_draining = False
        """Set once, when the front begins to drain."""

    async def start(
        self,
        wire: inference_pb2.GenerateRequest,
        tenant: Tenant,
        *,
        timeout_s: float | None = None,
        options: PromptOptions = PLAIN_PROMPT,
        origin: Origin = UNKNOWN_ORIGIN,
    ) -> ActiveRequest:
        """Starts a request; who calls this owns it and cancels it when the client goes away.

        Args:
            wire: what the client asks for, nothing of it checked yet.
            tenant: on whose behalf.
            timeout_s: the client's own time budget.
            options: how the prompt becomes tokens.
            origin: what else the client said of its call, for logs.

        Raises:
            PdserveError: it is refused, and why.
        """
        try:
            return await self._start(wire, tenant, timeout_s, options, origin)
        except PdserveError as error:
            self._metrics.note_shed(error)
            raise
        except Exception as error:
            logger.exception("a request could not be started")
            failure = InternalError("the router failed on this request")
            self._metrics.note_shed(failure)
            raise failure from error

    async def _start(
        self,
        wire: inference_pb2.GenerateRequest,
        tenant: Tenant,
        timeout_s: float | None,
        options: PromptOptions,
        origin: Origin,
    ) -> ActiveRequest:
        self._check_draining()
        limits_s = [limit for limit in (timeout_s, self._default_timeout_s) if limit is not None]
        received_s = self._clock.now()
        slo = self._slo_classes.find(
            wire.slo_class,
            ttft_s=wire.ttft_slo_s if wire.HasField("ttft_slo_s") else None,
            tpot_s=wire.tpot_slo_s if wire.HasField("tpot_slo_s") else None,
        )
        salt = narrow_salt(tenant.salt, options.cache_salt)
        made = await self.maker.make(
            wire,
            min(limits_s, default=None),
            tenant_salt=salt,
            options=options,
            trace_id=origin.trace_id,
        )
        echo = await self.maker.make_echo(made)
        self._check_draining()
        return self.dispatcher.start(
            made,
            mint_handoff_id(),
            received_s=received_s,
            tenant=tenant.name,
            http_request_id=origin.http_request_id,
            echo=echo,
            slo=slo,
        )

    def _check_draining(self) -> None:
        if self.is_draining:
            raise NoWorker("this router is draining")


async def events_of(active: ActiveRequest) -> AsyncIterator[Event]:
    """Yields what was asked of the prompt, output as it comes, and the completion.

    Raises:
        PdserveError: it ended with an error.
    """
    while (event := await active.buffer.take()) is not None:
        yield token_chunk(event) if isinstance(event, Delta) else event
    ending = active.buffer.ending
    assert ending is not None, "deltas end with the ending"
    if ending.error is not None:
        raise ending.error
    assert ending.completion is not None
    yield ending.completion


def token_chunk(delta: Delta) -> inference_pb2.TokenChunk:
    """Encodes new output of one sample in a message of its own."""
    return inference_pb2.TokenChunk(
        index=delta.index, token_ids=delta.token_ids, text=delta.text, logprobs=delta.logprobs
    )
