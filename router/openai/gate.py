"""Around every HTTP call: its key, its X-Request-Id, its count."""

import re
import secrets

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdserve.errors import Unauthenticated
from router.auth import OPEN_PATHS
from router.openai.errors import HttpRefusal, error_response
from router.openai.metrics import HttpMetrics
from router.tenants import Keyring, Tenant

TENANT_KEY = "pdserve.tenant"
REQUEST_ID_KEY = "pdserve.request_id"
_TWO_LENGTHS = HttpRefusal(
    400, "two_lengths", "a request has Content-Length or Transfer-Encoding, not both"
)
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


class Gate:
    """Lets calls through to the routes, unknown paths too, if their key is known.

    X-Request-Id is echoed, logged, and looked up when a request is to be explained. It is never
    used as a key: two clients may choose the same.
    """

    def __init__(self, app: ASGIApp, keyring: Keyring, metrics: HttpMetrics) -> None:
        """Takes the routes."""
        self._app = app
        self._keyring = keyring
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one call."""
        if scope["type"] != "http":
            return
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        request_id = _request_id(headers)
        path: str = scope["path"]

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
                self._metrics.note_answer(path, message["status"])
            await send(message)

        names = {name for name, _ in headers}
        if b"content-length" in names and b"transfer-encoding" in names:
            # A proxy before this might take the body for one of another length (RFC 9112, 6.1).
            answer = error_response(_TWO_LENGTHS)
            answer.headers["connection"] = "close"
            await answer(scope, receive, send_with_id)
            return
        if path not in OPEN_PATHS:
            try:
                scope[TENANT_KEY] = self._keyring.authenticate(_authorization(headers))
            except Unauthenticated as error:
                await error_response(error)(scope, receive, send_with_id)
                return
        scope[REQUEST_ID_KEY] = request_id.decode()
        await self._app(scope, receive, send_with_id)


def tenant_of(scope: Scope) -> Tenant:
    """Returns whom the gate let in; KeyError on a path that is open to all."""
    tenant = scope[TENANT_KEY]
    assert isinstance(tenant, Tenant)
    return tenant


def _authorization(headers: list[tuple[bytes, bytes]]) -> str | None:
    values = [value for name, value in headers if name == b"authorization"]
    # Of two different headers a proxy might have checked the other one.
    return values[0].decode("latin-1") if len(values) == 1 else None


def _request_id(headers: list[tuple[bytes, bytes]]) -> bytes:
    for name, value in headers:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return value
    return f"req-{secrets.token_hex(12)}".encode()
