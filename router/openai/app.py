"""The routes of the HTTP front."""

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from pdserve.errors import InternalError, ModelNotFound, PdserveError
from pdserve.exposition import CONTENT_TYPE
from pdserve.request import RequestId
from pdserve.trace import parse_traceparent
from pdserve.version import VERSION
from router.explain_wire import explanation_to_json
from router.front_desk import FrontDesk
from router.intake import Intake, Origin
from router.openai.answer import Answer, StreamedAnswer, answer_whole
from router.openai.body import read_json
from router.openai.call import Call
from router.openai.chat import parse_chat
from router.openai.compatibility import UnknownFields
from router.openai.completions import parse_completion
from router.openai.errors import HttpRefusal, error_response, json_response
from router.openai.event_stream import PING_INTERVAL_S
from router.openai.fields import Fields
from router.openai.gate import REQUEST_ID_KEY, Gate, tenant_of
from router.openai.json_parts import BlockResponse, encode_in_turns
from router.openai.logprobs import TokenTexts
from router.openai.metrics import HttpMetrics
from router.openai.tokens import detokenize, tokenize
from router.tenants import Keyring

logger = logging.getLogger(__name__)

Handler = Callable[[Request], Awaitable[ASGIApp]]
Parser = Callable[[Fields, TokenTexts, UnknownFields], Call]


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpParts:
    """What the HTTP front takes from the router."""

    intake: Intake
    keyring: Keyring
    desk: FrontDesk
    registry: CollectorRegistry
    can_serve: Callable[[], bool]
    max_body_bytes: int
    is_strict: bool = False
    """Requests with unknown fields are refused."""
    ping_interval_s: float = PING_INTERVAL_S
    engine: str = "0"
    """The number of the front, for its series."""


class HttpFront:
    """One handler per route; all that generates goes through the intake that gRPC uses."""

    def __init__(self, parts: HttpParts) -> None:
        """Takes the parts of one front."""
        self._parts = parts
        self._maker = parts.intake.maker
        self._texts = TokenTexts(self._maker.tokenizer.table)
        self._unknown = UnknownFields(is_strict=parts.is_strict)
        self._created_s = int(time.time())

    def make_app(self) -> ASGIApp:
        """Returns the application, gate included."""
        get = (
            ("/v1/models", self._list_models),
            ("/v1/models/{name:path}", self._get_model),
            ("/v1/requests/{request_id}/explain", self._get_explanation),
            ("/health", self._get_health),
            ("/ping", self._get_health),
            ("/version", self._get_version),
            ("/metrics", self._get_metrics),
        )
        post = (
            ("/v1/chat/completions", self._post_chat),
            ("/v1/completions", self._post_completion),
            ("/tokenize", self._post_tokenize),
            ("/detokenize", self._post_detokenize),
        )
        routes = [Route(path, _at_edge(handler), methods=["GET"]) for path, handler in get]
        routes += [Route(path, _at_edge(handler), methods=["POST"]) for path, handler in post]
        app = Starlette(routes=routes, exception_handlers={HTTPException: _refuse_route})
        app.router.redirect_slashes = False
        paths = [path for path, _ in (*get, *post)]
        metrics = HttpMetrics(self._parts.registry, paths, self._parts.engine)
        return Gate(app, self._parts.keyring, metrics)

    async def _post_chat(self, request: Request) -> ASGIApp:
        return await self._generate(request, parse_chat)

    async def _post_completion(self, request: Request) -> ASGIApp:
        return await self._generate(request, parse_completion)

    async def _generate(self, request: Request, parse: Parser) -> ASGIApp:
        call = parse(await self._read(request), self._texts, self._unknown)
        slo_class = request.headers.get("x-slo-class", "")
        for wire in call.wires:
            wire.slo_class = slo_class
        answer = Answer(call, self._maker.limits.served_name)
        origin = Origin(
            trace_id=parse_traceparent(request.headers.getlist("traceparent")),
            http_request_id=request.scope[REQUEST_ID_KEY],
        )
        await answer.start(self._parts.intake, tenant_of(request.scope), origin)
        if call.is_streaming:
            return StreamedAnswer(answer, self._parts.ping_interval_s)
        return await answer_whole(answer, request.receive)

    async def _post_tokenize(self, request: Request) -> ASGIApp:
        fields = await self._read(request)
        found = await tokenize(fields, self._maker, self._texts, self._unknown)
        return BlockResponse(await encode_in_turns(found))

    async def _post_detokenize(self, request: Request) -> ASGIApp:
        fields = await self._read(request)
        found = await detokenize(fields, self._maker, self._unknown)
        return BlockResponse(await encode_in_turns(found))

    async def _read(self, request: Request) -> Fields:
        return Fields(await read_json(request, self._parts.max_body_bytes))

    async def _list_models(self, _: Request) -> ASGIApp:
        return json_response({"object": "list", "data": [self._model()]})

    async def _get_model(self, request: Request) -> ASGIApp:
        name: str = request.path_params["name"]
        served = self._maker.limits.served_name
        if name != served:
            raise ModelNotFound(f"model {name[:128]!r} is not served, {served!r} is")
        return json_response(self._model())

    async def _get_explanation(self, request: Request) -> ASGIApp:
        request_id = RequestId(request.path_params["request_id"])
        tenant = tenant_of(request.scope)
        found = await self._parts.desk.explain(request_id, tenant.name)
        return json_response(explanation_to_json(found))

    def _model(self) -> dict[str, object]:
        limits = self._maker.limits
        return {
            "id": limits.served_name,
            "object": "model",
            "created": self._created_s,
            "owned_by": "pdserve",
            "root": limits.served_name,
            "parent": None,
            "max_model_len": limits.max_model_len,
        }

    async def _get_health(self, _: Request) -> ASGIApp:
        is_healthy = self._parts.can_serve()
        body = {"status": "ok" if is_healthy else "unavailable"}
        return json_response(body, 200 if is_healthy else 503)

    async def _get_version(self, _: Request) -> ASGIApp:
        return json_response({"version": VERSION})

    async def _get_metrics(self, _: Request) -> ASGIApp:
        return Response(await self._parts.desk.expose(), media_type=CONTENT_TYPE)


class _Edge:
    """Runs a handler; whatever it raises becomes an answer."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        try:
            response = await self._handler(request)
        except PdserveError as error:
            response = error_response(error)
        except ClientDisconnect:
            return
        except Exception:
            logger.exception("http call failed")
            response = error_response(InternalError("see the log"))
        await response(scope, receive, send)


def _at_edge(handler: Handler) -> ASGIApp:
    return _Edge(handler)


async def _refuse_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    method, path = request.method[:16], request.url.path[:128]
    if error.status_code == 405:
        refusal = HttpRefusal(405, "method_not_allowed", f"{path} does not take {method}")
    else:
        refusal = HttpRefusal(error.status_code, "not_found", f"there is no {method} {path}")
    response = error_response(refusal)
    response.headers.update(error.headers or {})
    return response
