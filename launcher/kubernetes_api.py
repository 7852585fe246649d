"""The few calls of the Kubernetes API that sizing pools takes: HTTP, a token, and JSON.

In a pod the service account's files say all that is needed: a token, which the kubelet renews from
time to time and which is read anew for each call, the CA of the API server, and the namespace.
"""

import http.client
import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from pdserve.errors import ConfigError, PoolApiError

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
IN_CLUSTER_URL = "https://kubernetes.default.svc"
MAX_ANSWER_BYTES = 16 << 20
_MERGE_PATCH = "application/merge-patch+json"

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class KubernetesConfig:
    """Where the API server is, and what to show it."""

    url: str = IN_CLUSTER_URL
    token_file: Path = SERVICE_ACCOUNT / "token"
    ca_file: Path = SERVICE_ACCOUNT / "ca.crt"
    """Of use with https."""
    namespace: str
    timeout_s: float = 5.0
    """Of one call."""

    def __post_init__(self) -> None:
        """Checks the URL.

        Raises:
            ConfigError: it is none.
        """
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"the URL of the API server must be https://..., got {self.url!r}")


def read_namespace(folder: Path = SERVICE_ACCOUNT) -> str:
    """Returns the namespace of the pod that this is.

    Raises:
        ConfigError: this is none with a service account.
    """
    try:
        return (folder / "namespace").read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError("--namespace must be given outside of a pod") from error


class KubernetesApi:
    """Calls the API server, each time over a new connection. Any thread may call."""

    def __init__(self, config: KubernetesConfig) -> None:
        """Reads the CA; calls nobody.

        Raises:
            ConfigError: the CA's file is none.
        """
        self._config = config
        self._url = urlsplit(config.url)
        self._tls: ssl.SSLContext | None = None
        if self._url.scheme == "https":
            try:
                self._tls = ssl.create_default_context(cafile=str(config.ca_file))
            except (OSError, ssl.SSLError) as error:
                raise ConfigError(f"{config.ca_file} is no CA: {error}") from error

    def get(self, *path: str, query: Mapping[str, str] | None = None) -> Json:
        """Reads an object or a list of the namespace; `path` begins with the API group.

        Raises:
            PoolApiError: the server refused, or did not answer.
        """
        return self._call("GET", path, query=query)

    def put(self, *path: str, body: Json) -> Json:
        """Replaces an object.

        Raises:
            PoolApiError: as `get`; status 409 where it has changed since it was read.
        """
        return self._call("PUT", path, body=body)

    def patch(self, *path: str, body: Json) -> Json:
        """Changes some fields of an object.

        Raises:
            PoolApiError: as `get`.
        """
        return self._call("PATCH", path, body=body, content_type=_MERGE_PATCH)

    def _call(
        self,
        method: str,
        path: tuple[str, ...],
        *,
        query: Mapping[str, str] | None = None,
        body: Json | None = None,
        content_type: str = "application/json",
    ) -> Json:
        group, *rest = path
        words = ("namespaces", self._config.namespace, *rest)
        target = f"{self._url.path.rstrip('/')}/{group}/{'/'.join(map(quote, words))}"
        if query:
            target += f"?{urlencode(query)}"
        headers = {"Accept": "application/json", **self._bearer()}
        data = None
        if body is not None:
            data = json.dumps(body).encode()
            headers["Content-Type"] = content_type
        connection = self._connect()
        try:
            connection.request(method, target, body=data, headers=headers)
            answer = connection.getresponse()
            text = answer.read(MAX_ANSWER_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise PoolApiError(f"the API server does not answer: {error!r}", status=None) from error
        finally:
            connection.close()
        return _read_answer(answer.status, text, f"{method} {target}")

    def _connect(self) -> http.client.HTTPConnection:
        host, port, timeout_s = self._url.hostname, self._url.port, self._config.timeout_s
        assert host is not None
        if self._tls is None:
            return http.client.HTTPConnection(host, port, timeout=timeout_s)
        return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=self._tls)

    def _bearer(self) -> dict[str, str]:
        try:
            token = self._config.token_file.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise PoolApiError(f"no token to show: {error}", status=None) from error
        return {"Authorization": f"Bearer {token}"}


def _read_answer(status: int, text: bytes, what: str) -> Json:
    try:
        found = json.loads(text) if text else {}
    except ValueError:
        found = None
    if 200 <= status < 300:
        if not isinstance(found, dict):
            raise PoolApiError(f"{what}: the API server's answer is no JSON object", status=status)
        return found
    # A Status object says why; what stands in front of the server may answer with anything.
    said = found.get("message") if isinstance(found, dict) else None
    raise PoolApiError(f"{what}: {status} {said or repr(text[:200])}", status=status)
